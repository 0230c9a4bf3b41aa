#include "tcp.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace kbtp {
namespace {

constexpr u32 kProbes = 5;

using Address = std::array<u8, 16>;

std::optional<Address> address_of(const sockaddr_storage& socket_address) {
    Address out{};
    if (socket_address.ss_family == AF_INET6) {
        std::memcpy(out.data(), &reinterpret_cast<const sockaddr_in6&>(socket_address).sin6_addr, 16);
        return out;
    }
    if (socket_address.ss_family != AF_INET) return {};
    out[10] = out[11] = 0xff;
    std::memcpy(&out[12], &reinterpret_cast<const sockaddr_in&>(socket_address).sin_addr, 4);
    return out;
}

template <class Get>
std::optional<Address> address_from(Get get, int fd) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    if (get(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return {};
    return address_of(address);
}

bool is_in(const Address& address, const CongestionRule& rule) {
    const u32 whole = rule.prefix_bits / 8, rest = rule.prefix_bits % 8;
    if (!std::equal(address.begin(), address.begin() + whole, rule.network.begin())) return false;
    return rest == 0 || (address[whole] ^ rule.network[whole]) >> (8 - rest) == 0;
}

// Both ends on this machine: the two addresses are the same.
const std::string& congestion_for(int fd, const TcpOptions& options) {
    const auto peer = address_from(::getpeername, fd);
    if (!peer) return options.congestion_remote;
    for (const CongestionRule& rule : options.congestion_peers)
        if (is_in(*peer, rule)) return rule.name;
    return peer == address_from(::getsockname, fd) ? options.congestion_local : options.congestion_remote;
}

void set(int fd, int level, int option, u32 value) { ::setsockopt(fd, level, option, &value, sizeof value); }

}  // namespace

// Small messages must not wait for each other. A peer whose host vanished must not hold a socket for ever: the kernel gives up once it has
// acknowledged nothing for `keepalive_s`, be it data or, on an idle connection, the probes that are sent in the second half of that time.
void configure_socket(int fd, const TcpOptions& options) {
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(options.keepalive_s / 2, 1u));
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(options.keepalive_s / 2 / kProbes, 1u));
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
    set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, options.keepalive_s * 1000);
    const std::string& name = congestion_for(fd, options);
    if (!name.empty()) ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size()));
}

std::string peer_name(int fd) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
        ::getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host, sizeof host, port, sizeof port,
                      NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return "?";
    return std::string(host) + ":" + port;
}

}  // namespace kbtp
