// The passive side until a queue pair takes over: listening, and reading a peer's MPA Request to its last octet.
#include <netdb.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "device.hpp"

namespace kbtp {
namespace {

constexpr auto kAcceptPause = std::chrono::milliseconds(100);

u16 port_of(const sockaddr_storage& address) {
    if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
    return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace

std::shared_ptr<Listener> Device::listen(const std::string& host, u16 port, std::shared_ptr<CompletionQueue> cq, double startup_timeout_s,
                                         u32 backlog) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE;
    if (const int e = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); e != 0)
        throw std::invalid_argument("cannot listen on " + host + ": " + ::gai_strerror(e));
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(found, ::freeaddrinfo);
    const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const int on = 1;
    if (fd >= 0) ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || ::bind(fd, found->ai_addr, found->ai_addrlen) != 0 || ::listen(fd, static_cast<int>(backlog)) != 0) {
        const int error = errno;
        if (fd >= 0) ::close(fd);
        throw std::system_error(error, std::generic_category(), "cannot listen on " + host + ":" + std::to_string(port));
    }
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size);
    auto listener = std::make_shared<Listener>(shared_from_this(), fd, host, port_of(bound), std::move(cq), startup_timeout_s, backlog);
    front().submit([this, listener, fd] {
        listeners_.push_back(listener);  // epoll holds a plain pointer: whoever forgets to close a listener must not free it
        front().watch(fd, listener.get(), EPOLLIN);
    });
    return listener;
}

Listener::Listener(std::shared_ptr<Device> device, int fd, std::string host, u16 port, std::shared_ptr<CompletionQueue> cq,
                   double startup_timeout_s, u32 backlog)
    : device_(std::move(device)),
      fd_(fd),
      host_(std::move(host)),
      port_(port),
      cq_(std::move(cq)),
      startup_timeout_s_(startup_timeout_s),
      backlog_(backlog) {}

Listener::~Listener() {
    if (fd_ >= 0) ::close(fd_);
}

void Listener::on_event(u32) {
    for (;;) {
        const int fd = ::accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && errno == EINTR) continue;
        if (fd < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) pause();
            return;
        }
        if (!make_room()) {
            ::close(fd);
            continue;
        }
        configure_socket(fd, device_->options().tcp);
        auto pending = std::make_shared<PendingConnection>(device_, weak_from_this(), fd, peer_name(fd));
        pending->deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(startup_timeout_s_));
        starting_.push_back(pending);
        device_->front().watch(fd, pending.get(), EPOLLIN);
        device_->front().time(pending);
    }
}

// A flood of silent peers must neither hold more than `backlog_` nor keep others out: the one that has been silent longest goes. False if
// all have said what they want and wait for the ULP.
bool Listener::make_room() {
    if (starting_.size() < backlog_) return true;
    const auto silent = std::find_if(starting_.begin(), starting_.end(), [](const auto& p) { return !p->is_announced(); });
    if (silent == starting_.end()) return false;
    const auto keep = *silent;
    keep->drop();
    return true;
}

// No descriptors left: the rest waits in the kernel's backlog, and the loop must not spin on it.
void Listener::pause() {
    device_->front().rearm(fd_, this, 0);
    deadline = Clock::now() + kAcceptPause;
    device_->front().time(shared_from_this());
}

void Listener::on_deadline() {
    if (fd_ >= 0) device_->front().rearm(fd_, this, EPOLLIN);
}

void Listener::announce(std::shared_ptr<PendingConnection> request) {
    {
        std::lock_guard lock(mutex_);
        ready_.push_back(std::move(request));
    }
    cq_->wake();
}

void Listener::gone(const PendingConnection* request) {
    std::erase_if(starting_, [&](const auto& p) { return p.get() == request; });
    std::lock_guard lock(mutex_);
    std::erase_if(ready_, [&](const auto& p) { return p.get() == request; });
}

std::vector<std::shared_ptr<PendingConnection>> Listener::poll() {
    std::lock_guard lock(mutex_);
    return std::exchange(ready_, {});
}

void Listener::close() {
    const bool running = device_->front().submit([self = shared_from_this()] {
        if (self->fd_ < 0) return;
        self->device_->front().unwatch(self->fd_);
        ::close(self->fd_);
        self->fd_ = -1;
        for (const auto& pending : std::vector(self->starting_)) pending->on_deadline();
        self->device_->forget(*self);
        self->device_->front().keep_until_idle(self);
    });
    if (!running && fd_ >= 0) ::close(std::exchange(fd_, -1));  // the loop has ended
}

PendingConnection::PendingConnection(std::shared_ptr<Device> device, std::weak_ptr<Listener> listener, int fd, std::string peer)
    : device_(std::move(device)), listener_(std::move(listener)), fd_(fd), peer_(std::move(peer)), capture_(device_->capture(fd, false)) {}

PendingConnection::~PendingConnection() {
    if (fd_ >= 0) socket_close(capture_.get(), fd_);
}

// Read the Request and nothing after it: the octets that follow are FPDUs, for the queue pair.
void PendingConnection::on_event(u32) {
    if (announced_) return drop();  // only errors and an early end are asked for any more
    for (;;) {
        std::size_t want = wire::kStartupHeader;
        if (frame_.size() >= wire::kStartupHeader) {
            const auto length = wire::startup_length(std::span<const u8, wire::kStartupHeader>(frame_.data(), wire::kStartupHeader), false);
            if (!length) return drop();  // 1.3 rule 3: no reply
            want += *length;
            if (frame_.size() == want) break;
        }
        u8 piece[wire::kStartupHeader + wire::kMaxPrivateData];
        const ssize_t n = socket_receive(capture_.get(), fd_, piece, want - frame_.size());
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
        if (n <= 0) return drop();
        frame_.insert(frame_.end(), piece, piece + n);
    }
    auto request = wire::decode_startup(frame_);
    if (!request) return drop();
    request_ = std::move(*request);
    announced_ = true;
    device_->front().rearm(fd_, this, 0);
    if (auto listener = listener_.lock()) listener->announce(shared_from_this());
}

void PendingConnection::on_deadline() {
    if (!taken_) drop();
}

void PendingConnection::drop() {
    if (taken_.exchange(true)) return;
    const auto self = shared_from_this();
    device_->front().unwatch(fd_);
    socket_close(capture_.get(), fd_);
    fd_ = -1;
    device_->front().keep_until_idle(self);
    if (auto listener = listener_.lock()) listener->gone(this);
}

std::shared_ptr<QueuePair> PendingConnection::create_qp(u32 pd, std::shared_ptr<CompletionQueue> cq, QueueLimits limits) {
    if (taken_.exchange(true)) return nullptr;
    auto pair = device_->create_qp(pd, std::move(cq), limits);
    device_->front().unwatch(fd_);
    pair->adopt(std::exchange(fd_, -1), std::move(capture_), peer_, request_);
    device_->front().submit([self = shared_from_this()] {
        self->deadline = TimePoint::max();
        self->device_->front().keep_until_idle(self);
        if (auto listener = self->listener_.lock()) listener->gone(self.get());
    });
    return pair;
}

void PendingConnection::reject(std::vector<u8> private_data) {
    if (private_data.size() > wire::kMaxUlpPrivateData) throw std::invalid_argument("private data is longer than 252 octets");
    if (taken_.exchange(true)) return;
    device_->front().submit([self = shared_from_this(), data = std::move(private_data)]() mutable {
        wire::Startup reply;
        reply.is_reply = reply.rejected = true;
        reply.revision = self->request_.revision;
        reply.crc = self->device_->options().crc;
        reply.enhanced = self->request_.enhanced;
        reply.peer_to_peer = reply.rtr_send = reply.rtr_write = reply.rtr_read = self->request_.peer_to_peer;
        reply.private_data = std::move(data);
        const auto frame = wire::encode_startup(reply);
        socket_send(self->capture_.get(), self->fd_, frame);
        self->device_->front().unwatch(self->fd_);
        socket_close(self->capture_.get(), std::exchange(self->fd_, -1));
        self->deadline = TimePoint::max();
        self->device_->front().keep_until_idle(self);
        if (auto listener = self->listener_.lock()) listener->gone(self.get());
    });
}

}  // namespace kbtp
