// What the device asks of TCP, and what it can tell of a connection's two ends.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "bytes.hpp"

namespace kbtp {

// A network, with IPv4 as IPv6 has it (::ffff:a.b.c.d), and the congestion control of connections with peers in it.
struct CongestionRule {
    std::array<u8, 16> network;
    u32 prefix_bits;
    std::string name;
};

// An empty name of a congestion control is the system's choice.
struct TcpOptions {
    u32 keepalive_s = 60;  // a peer without a sign of life for so long is given up
    std::string congestion_local, congestion_remote;
    std::vector<CongestionRule> congestion_peers;  // the first that has the peer's address counts
};

// A connected socket. Best effort: what the kernel does not allow leaves its default in place.
void configure_socket(int fd, const TcpOptions& options);

// "host:port", or "?".
std::string peer_name(int fd);

}  // namespace kbtp
