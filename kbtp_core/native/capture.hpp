// What a device's connections carried, as a pcap file that Wireshark reads: Ethernet, IP and TCP headers made up around the very octets
// that the socket was given and gave.
//
// Rules:
// 1. A connection in the file is whole: its SYN exchange first, every octet of both directions once and in order, its FIN or RST last.
//    A connection between two queue pairs of one device is written down at one of its ends only.
// 2. An octet is written after the system call that moved it, under the stream's lock that is held over that call. So an answer never
//    stands before what it answers.
// 3. The file has a bound. A packet that would pass it, and all that follow, are counted and not written.
// 4. Trouble with the file never reaches a connection: the first error ends the capture after its last whole packet, and is counted.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>

#include "bytes.hpp"

namespace kbtp {

struct CaptureOptions {
    std::string path;
    u64 limit_bytes = 0;
    bool checksums = true;  // of IP and TCP; else zero, as where a NIC computes them
};

struct CaptureStats {
    u64 packets = 0, bytes = 0, dropped_packets = 0, errors = 0;
};

struct Endpoint {  // an IPv4 or IPv6 address and a port, as headers have them
    std::array<u8, 16> address{};
    std::size_t address_bytes = 4;
    u16 port = 0;
    auto operator<=>(const Endpoint&) const = default;
};

class CaptureStream;

// The file. Any thread.
class Capture : public std::enable_shared_from_this<Capture> {
  public:
    // Makes the file anew; throws std::system_error.
    explicit Capture(const CaptureOptions& options);
    ~Capture();
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;

    // A connected socket. Null if this connection is written down already (rule 1), or its addresses can't be told.
    std::unique_ptr<CaptureStream> open_stream(int fd, bool is_active);
    CaptureStats stats() const;

  private:
    friend class CaptureStream;
    using Connection = std::pair<Endpoint, Endpoint>;  // the smaller end first
    struct Packet {
        const Endpoint &from, &to;
        u32 seq, ack;
        u8 flags;
        std::span<const iovec> payload;
        std::size_t bytes;
    };
    void write(const Packet& packet);
    void forget(const Connection& connection);

    const CaptureOptions options_;
    mutable std::mutex mutex_;  // guards all below
    int fd_;
    std::set<Connection> open_;
    CaptureStats stats_;
    u64 file_bytes_ = 0;
    u16 ip_id_ = 0;
};

// One connection. Its calls do what the system calls of their names do, and write down what came of it.
class CaptureStream {
  public:
    CaptureStream(std::shared_ptr<Capture> capture, Endpoint local, Endpoint remote, bool is_active);
    ~CaptureStream();  // writes the end down, if `close` did not
    CaptureStream(const CaptureStream&) = delete;
    CaptureStream& operator=(const CaptureStream&) = delete;

    ssize_t send(int fd, const msghdr& message);
    ssize_t receive(int fd, std::span<const iovec> pieces);
    void finish(int fd);
    void close(int fd);

  private:
    struct Side {
        Endpoint end;
        u32 next = 0;  // sequence number
        bool finished = false;
    };
    void put(const Side& from, const Side& to, u8 flags, std::span<const iovec> payload = {}, std::size_t bytes = 0);
    void carry(Side& from, const Side& to, std::span<const iovec> payload, std::size_t bytes);
    void end_of(Side& from, const Side& to);
    void reset(const Side& from, const Side& to);

    const std::shared_ptr<Capture> capture_;
    std::mutex mutex_;  // guards all below, and orders what is written down
    Side local_, remote_;
    bool is_over_ = false;  // reset, or closed here: nothing more is written
    bool is_closed_ = false;
};

// The system calls of a connection, with or without a capture.
inline ssize_t socket_send(CaptureStream* capture, int fd, const msghdr& message) {
    return capture ? capture->send(fd, message) : ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}
inline ssize_t socket_send(CaptureStream* capture, int fd, std::span<const u8> octets) {
    iovec piece{const_cast<u8*>(octets.data()), octets.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    return socket_send(capture, fd, message);
}
inline ssize_t socket_receive(CaptureStream* capture, int fd, u8* into, std::size_t size) {
    const iovec piece{into, size};
    return capture ? capture->receive(fd, {&piece, 1}) : ::recv(fd, into, size, MSG_DONTWAIT);
}
inline ssize_t socket_receive(CaptureStream* capture, int fd, std::span<const iovec> pieces) {
    return capture ? capture->receive(fd, pieces) : ::readv(fd, pieces.data(), static_cast<int>(pieces.size()));
}
inline void socket_finish(CaptureStream* capture, int fd) { capture ? capture->finish(fd) : (void)::shutdown(fd, SHUT_WR); }
inline void socket_close(CaptureStream* capture, int fd) { capture ? capture->close(fd) : (void)::close(fd); }

}  // namespace kbtp
