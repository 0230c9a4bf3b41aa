#include "capture.hpp"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

namespace kbtp {
namespace {

constexpr u8 kFin = 0x01, kSyn = 0x02, kRst = 0x04, kPush = 0x08, kAck = 0x10;
constexpr std::size_t kRecordHeader = 16, kEthernet = 14, kIpv4 = 20, kIpv6 = 40, kTcp = 20, kSynOptions = 8;
// An IPv4 packet has at most 65,535 octets, headers included; both families are cut alike.
constexpr std::size_t kMaxPayload = 65535 - kIpv6 - kTcp;
constexpr u8 kWindowScale = 14;  // the window is said to be 1 GiB: the real one is not known here

template <class T>
void store_host(u8* at, T v) {
    std::memcpy(at, &v, sizeof v);
}

std::optional<Endpoint> endpoint(const sockaddr_storage& address) {
    Endpoint e;
    if (address.ss_family == AF_INET) {
        const auto& in = reinterpret_cast<const sockaddr_in&>(address);
        std::memcpy(e.address.data(), &in.sin_addr, 4);
        e.port = ntohs(in.sin_port);
        return e;
    }
    if (address.ss_family != AF_INET6) return {};
    const auto& in = reinterpret_cast<const sockaddr_in6&>(address);
    const bool is_mapped = IN6_IS_ADDR_V4MAPPED(&in.sin6_addr);
    e.address_bytes = is_mapped ? 4 : 16;
    std::memcpy(e.address.data(), in.sin6_addr.s6_addr + (is_mapped ? 12 : 0), e.address_bytes);
    e.port = ntohs(in.sin6_port);
    return e;
}

// The Internet checksum (RFC 1071) over pieces of any length.
class Checksum {
  public:
    void add(const u8* p, std::size_t n) {
        if (odd_ && n > 0) {
            sum_ += *p++;
            --n;
            odd_ = false;
        }
        for (; n >= 4; p += 4, n -= 4) sum_ += load_be<u32>(p);
        if (n >= 2) {
            sum_ += load_be<u16>(p);
            p += 2;
            n -= 2;
        }
        if (n > 0) {
            sum_ += u64{*p} << 8;
            odd_ = true;
        }
    }
    void add(u32 number) { sum_ += number; }
    u16 value() const {
        u64 s = sum_;
        while (s >> 16) s = (s & 0xffff) + (s >> 16);
        return static_cast<u16>(~s);
    }

  private:
    u64 sum_ = 0;  // of 16- and 32-bit words, which are the same modulo 65,535
    bool odd_ = false;
};

// Locally administered, and the same for the same address.
void write_mac(u8* at, const Endpoint& e) {
    at[0] = 0x02;
    at[1] = static_cast<u8>(e.address_bytes);
    std::memcpy(at + 2, e.address.data() + e.address_bytes - 4, 4);
}

void write_ipv4(u8* ip, const Endpoint& from, const Endpoint& to, std::size_t tcp_bytes, u16 id, bool checksums) {
    ip[0] = 0x45;
    store_be<u16>(ip + 2, static_cast<u16>(kIpv4 + tcp_bytes));
    store_be<u16>(ip + 4, id);
    ip[6] = 0x40;  // don't fragment
    ip[8] = 64;
    ip[9] = IPPROTO_TCP;
    std::memcpy(ip + 12, from.address.data(), 4);
    std::memcpy(ip + 16, to.address.data(), 4);
    Checksum sum;
    sum.add(ip, kIpv4);
    if (checksums) store_be<u16>(ip + 10, sum.value());
}

void write_ipv6(u8* ip, const Endpoint& from, const Endpoint& to, std::size_t tcp_bytes) {
    ip[0] = 0x60;
    store_be<u16>(ip + 4, static_cast<u16>(tcp_bytes));
    ip[6] = IPPROTO_TCP;
    ip[7] = 64;
    std::memcpy(ip + 8, from.address.data(), 16);
    std::memcpy(ip + 24, to.address.data(), 16);
}

// The pieces of [at, at + n) of `payload`.
std::vector<iovec> cut(std::span<const iovec> payload, std::size_t at, std::size_t n) {
    std::vector<iovec> pieces;
    for (const iovec& p : payload) {
        if (n == 0) break;
        if (at >= p.iov_len) {
            at -= p.iov_len;
            continue;
        }
        const std::size_t step = std::min(p.iov_len - at, n);
        pieces.push_back({static_cast<u8*>(p.iov_base) + at, step});
        n -= step;
        at = 0;
    }
    return pieces;
}

// All of `pieces` to the file; false on any error.
bool write_all(int fd, std::vector<iovec> pieces) {
    for (std::size_t next = 0; next < pieces.size();) {
        const std::size_t count = std::min<std::size_t>(pieces.size() - next, IOV_MAX);
        ssize_t n = ::writev(fd, &pieces[next], static_cast<int>(count));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        for (; next < pieces.size() && static_cast<std::size_t>(n) >= pieces[next].iov_len; ++next)
            n -= static_cast<ssize_t>(pieces[next].iov_len);
        if (n > 0) pieces[next] = {static_cast<u8*>(pieces[next].iov_base) + n, pieces[next].iov_len - static_cast<std::size_t>(n)};
    }
    return true;
}

}  // namespace

// --- the file ------------------------------------------------------------------------------------------------------------------

Capture::Capture(const CaptureOptions& options)
    : options_(options), fd_(::open(options.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "cannot write a capture to " + options.path);
    u8 header[24]{};
    store_host<u32>(header, 0xa1b23c4d);  // nanoseconds, in this machine's byte order
    store_host<u16>(header + 4, 2);
    store_host<u16>(header + 6, 4);
    store_host<u32>(header + 16, 262144);
    store_host<u32>(header + 20, 1);  // Ethernet
    if (!write_all(fd_, {{header, sizeof header}})) {
        const int error = errno;
        ::close(fd_);
        throw std::system_error(error, std::generic_category(), "cannot write a capture to " + options.path);
    }
    file_bytes_ = sizeof header;
}

Capture::~Capture() {
    if (fd_ >= 0) ::close(fd_);
}

CaptureStats Capture::stats() const {
    std::lock_guard lock(mutex_);
    CaptureStats stats = stats_;
    stats.bytes = file_bytes_;
    return stats;
}

std::unique_ptr<CaptureStream> Capture::open_stream(int fd, bool is_active) {
    sockaddr_storage mine{}, theirs{};
    socklen_t a = sizeof mine, b = sizeof theirs;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &a) != 0) return nullptr;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &b) != 0) return nullptr;
    const auto local = endpoint(mine), remote = endpoint(theirs);
    if (!local || !remote) return nullptr;
    {
        std::lock_guard lock(mutex_);
        if (!open_.insert(std::minmax(*local, *remote)).second) return nullptr;
    }
    return std::make_unique<CaptureStream>(shared_from_this(), *local, *remote, is_active);
}

void Capture::forget(const Connection& connection) {
    std::lock_guard lock(mutex_);
    open_.erase(connection);
}

void Capture::write(const Packet& p) {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    std::array<u8, kRecordHeader + kEthernet + kIpv6 + kTcp + kSynOptions> head{};
    const bool is_v4 = p.from.address_bytes == 4, is_syn = p.flags & kSyn;
    const std::size_t tcp_header = kTcp + (is_syn ? kSynOptions : 0), ip_header = is_v4 ? kIpv4 : kIpv6;
    const std::size_t packet_bytes = kEthernet + ip_header + tcp_header + p.bytes;

    u8* const ethernet = head.data() + kRecordHeader;
    write_mac(ethernet, p.to);
    write_mac(ethernet + 6, p.from);
    store_be<u16>(ethernet + 12, is_v4 ? 0x0800 : 0x86dd);

    u8* const tcp = ethernet + kEthernet + ip_header;
    store_be<u16>(tcp, p.from.port);
    store_be<u16>(tcp + 2, p.to.port);
    store_be<u32>(tcp + 4, p.seq);
    store_be<u32>(tcp + 8, p.flags & kAck ? p.ack : 0);
    tcp[12] = static_cast<u8>(tcp_header / 4 << 4);
    tcp[13] = p.flags;
    store_be<u16>(tcp + 14, 0xffff);
    if (is_syn) {
        const u8 options[kSynOptions] = {2, 4, kMaxPayload >> 8, kMaxPayload & 0xff, 1, 3, 3, kWindowScale};
        std::memcpy(tcp + kTcp, options, sizeof options);
    }
    if (options_.checksums) {
        Checksum sum;  // pseudo-header, TCP header, payload
        sum.add(p.from.address.data(), p.from.address_bytes);
        sum.add(p.to.address.data(), p.to.address_bytes);
        sum.add(IPPROTO_TCP);
        sum.add(static_cast<u32>(tcp_header + p.bytes));
        sum.add(tcp, tcp_header);
        for (const iovec& piece : p.payload) sum.add(static_cast<const u8*>(piece.iov_base), piece.iov_len);
        store_be<u16>(tcp + 16, sum.value());
    }
    const u64 record_bytes = kRecordHeader + packet_bytes;
    store_host<u32>(head.data(), static_cast<u32>(now.tv_sec));
    store_host<u32>(head.data() + 4, static_cast<u32>(now.tv_nsec));
    store_host<u32>(head.data() + 8, static_cast<u32>(packet_bytes));
    store_host<u32>(head.data() + 12, static_cast<u32>(packet_bytes));

    std::vector<iovec> pieces{{head.data(), kRecordHeader + kEthernet + ip_header + tcp_header}};
    pieces.insert(pieces.end(), p.payload.begin(), p.payload.end());

    std::lock_guard lock(mutex_);
    if (fd_ < 0 || file_bytes_ + record_bytes > options_.limit_bytes) {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
        ++stats_.dropped_packets;
        return;
    }
    u8* const ip = ethernet + kEthernet;
    is_v4 ? write_ipv4(ip, p.from, p.to, tcp_header + p.bytes, ip_id_++, options_.checksums)
          : write_ipv6(ip, p.from, p.to, tcp_header + p.bytes);
    if (write_all(fd_, std::move(pieces))) {
        file_bytes_ += record_bytes;
        ++stats_.packets;
        return;
    }
    ++stats_.errors;
    ++stats_.dropped_packets;
    [[maybe_unused]] auto n = ::ftruncate(fd_, static_cast<off_t>(file_bytes_));
    ::close(std::exchange(fd_, -1));
}

// --- a connection --------------------------------------------------------------------------------------------------------------

CaptureStream::CaptureStream(std::shared_ptr<Capture> capture, Endpoint local, Endpoint remote, bool is_active)
    : capture_(std::move(capture)), local_{local}, remote_{remote} {
    Side &caller = is_active ? local_ : remote_, &called = is_active ? remote_ : local_;
    put(caller, called, kSyn);
    caller.next = 1;
    put(called, caller, kSyn | kAck);
    called.next = 1;
    put(caller, called, kAck);
}

CaptureStream::~CaptureStream() {
    if (!is_closed_) close(-1);
}

ssize_t CaptureStream::send(int fd, const msghdr& message) {
    std::lock_guard lock(mutex_);
    const ssize_t n = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    const int error = errno;
    if (n > 0) carry(local_, remote_, {message.msg_iov, message.msg_iovlen}, static_cast<std::size_t>(n));
    if (n < 0 && error == ECONNRESET) reset(remote_, local_);
    errno = error;
    return n;
}

ssize_t CaptureStream::receive(int fd, std::span<const iovec> pieces) {
    std::lock_guard lock(mutex_);
    const ssize_t n = ::readv(fd, pieces.data(), static_cast<int>(pieces.size()));
    const int error = errno;
    if (n > 0) carry(remote_, local_, pieces, static_cast<std::size_t>(n));
    if (n == 0) end_of(remote_, local_);
    if (n < 0 && error == ECONNRESET) reset(remote_, local_);
    errno = error;
    return n;
}

void CaptureStream::finish(int fd) {
    std::lock_guard lock(mutex_);
    ::shutdown(fd, SHUT_WR);
    end_of(local_, remote_);
}

// A socket that is closed with octets unread resets its connection; else it sends a FIN, if it has not yet.
void CaptureStream::close(int fd) {
    std::lock_guard lock(mutex_);
    int unread = 0;
    if (fd >= 0) ::ioctl(fd, SIOCINQ, &unread);
    tcp_info info{};
    socklen_t size = sizeof info;
    const bool is_reset = fd >= 0 && ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_state == TCP_CLOSE;
    if (fd >= 0) ::close(fd);
    if (unread > 0)
        reset(local_, remote_);
    else if (is_reset && !(local_.finished && remote_.finished))
        reset(remote_, local_);
    else
        end_of(local_, remote_);
    is_over_ = is_closed_ = true;
    capture_->forget(std::minmax(local_.end, remote_.end));
}

void CaptureStream::put(const Side& from, const Side& to, u8 flags, std::span<const iovec> payload, std::size_t bytes) {
    capture_->write({from.end, to.end, from.next, to.next, flags, payload, bytes});
}

void CaptureStream::carry(Side& from, const Side& to, std::span<const iovec> payload, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += kMaxPayload) {
        const std::size_t n = std::min(kMaxPayload, bytes - at);
        put(from, to, kPush | kAck, cut(payload, at, n), n);
        from.next += static_cast<u32>(n);
    }
}

void CaptureStream::end_of(Side& from, const Side& to) {
    if (from.finished || is_over_) return;
    put(from, to, kFin | kAck);
    ++from.next;
    from.finished = true;
    if (to.finished) put(to, from, kAck);
}

void CaptureStream::reset(const Side& from, const Side& to) {
    if (is_over_) return;
    put(from, to, kRst | kAck);
    is_over_ = true;
}

}  // namespace kbtp
