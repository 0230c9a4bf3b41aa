// Life of a queue pair: start-up (RFC 5044 section 7.1, RFC 6581), the calls of other threads, and the end.
#include "queue_pair.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "device.hpp"

namespace kbtp {
namespace {

constexpr std::size_t kFrameArenaTotal = 65 * 512;  // headers, small payloads and trailers of kBurstFrames frames and an answer

}  // namespace

QueuePair::QueuePair(std::shared_ptr<Device> device, Loop& loop, u32 number, u32 pd, std::shared_ptr<CompletionQueue> cq,
                     QueueLimits limits)
    : device_(std::move(device)),
      loop_(loop),
      number_(number),
      pd_(pd),
      cq_(std::move(cq)),
      limits_(limits),
      next_atomic_id_(device_->options().first_atomic_id),
      ird_(limits.ird),
      ord_(limits.ord),
      spin_(device_->options().spin) {
    arena_.resize(kFrameArenaTotal);
}

QueuePair::~QueuePair() {
    if (fd_ >= 0) socket_close(capture_.get(), fd_);
}

RegionTable& QueuePair::regions() const { return device_->regions(); }

std::string QueuePair::peer() const {
    std::lock_guard lock(info_mutex_);
    return peer_;
}

std::vector<u8> QueuePair::peer_private_data() const {
    std::lock_guard lock(info_mutex_);
    return peer_private_data_;
}

bool QueuePair::is_open() const {
    const State s = state_.load();
    return s != State::idle && s != State::dead;
}

void QueuePair::set_deadline(double seconds) {
    deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    loop_.time(shared_from_this());
}

// --- calls of any thread -----------------------------------------------------------------------------------------------------

void QueuePair::connect(const std::string& host, u16 port, std::vector<u8> private_data) {
    if (private_data.size() > wire::kMaxUlpPrivateData) throw std::invalid_argument("private data is longer than 252 octets");
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    if (const int e = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); e != 0)
        throw std::invalid_argument("cannot resolve " + host + ": " + ::gai_strerror(e));
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(found, ::freeaddrinfo);
    {
        std::lock_guard lock(info_mutex_);
        peer_ = host + ":" + std::to_string(port);
    }
    startup_private_data_ = std::move(private_data);
    for (const addrinfo* a = found; a; a = a->ai_next) {
        Candidate c{.size = a->ai_addrlen};
        std::memcpy(&c.address, a->ai_addr, a->ai_addrlen);
        candidates_.push_back(c);
    }
    const bool running = later([](QueuePair& self) {
        {
            std::lock_guard lock(self.tx_mutex_);
            if (self.state_.load() != State::idle) return;
            self.state_.store(State::connecting);
        }
        self.set_deadline(self.limits_.startup_timeout_s);
        self.try_next_address();
    });
    if (!running) throw std::runtime_error("the device is closed");
}

void QueuePair::accept(std::vector<u8> private_data) {
    if (private_data.size() > wire::kMaxUlpPrivateData) throw std::invalid_argument("private data is longer than 252 octets");
    later([data = std::move(private_data)](QueuePair& self) mutable { self.reply_to_request(std::move(data)); });
}

QueuePair::Posted QueuePair::post_receive(std::span<const ReceiveRequest> requests) {
    std::vector<Receive> buffers;
    buffers.reserve(requests.size());
    for (const ReceiveRequest& r : requests) {
        RegionPtr region = device_->regions().find(r.stag);
        if (region && (region->pd() != pd_ || !region->has(access::local_write) || !region->contains(r.offset, r.length))) region = nullptr;
        buffers.push_back({r, std::move(region)});  // a bad one fails when it is used, as on hardware
    }
    std::lock_guard lock(rq_mutex_);
    if (state_.load() >= State::terminating) return Posted::closed;
    if (receive_queue_.size() + buffers.size() > limits_.receive_depth) return Posted::full;
    std::move(buffers.begin(), buffers.end(), std::back_inserter(receive_queue_));
    upcalls_ -= std::min<u32>(upcalls_, static_cast<u32>(requests.size()));
    return Posted::ok;
}

void QueuePair::attach_executor(std::shared_ptr<Executor> executor, RegionPtr pool, std::optional<StoreGrant> grant) {
    if (pool->pd() != pd_) throw std::invalid_argument("the pool region is of another protection domain than this queue pair");
    if (grant && executor->has_pool() && (!pool->has(access::local_write) || !executor->lies_in(*pool)))
        throw std::invalid_argument("stores need a pool region with LOCAL_WRITE that has all blocks of the executor's pool");
    // The device's own share of it: the caller's may be Python's, which can't be let go of under a lock.
    RegionPtr own = device_->regions().find(pool->stag());
    if (own != pool) throw std::invalid_argument("the pool region was closed");
    std::lock_guard lock(tx_mutex_);
    if (executor_) throw std::invalid_argument("this queue pair has an executor already");
    executor_.emplace(std::move(executor), grant, pool->length());
    pool_ = std::move(own);
    has_executor_ = true;
}

std::vector<u64> QueuePair::reading() {
    std::lock_guard lock(tx_mutex_);
    std::vector<u64> entries;
    const auto add = [&](const Message& m) {
        if (m.owner == Owner::executor_write) entries.push_back(m.owner_id);
    };
    for (const Message& m : burst_.finished) add(m);
    for (std::size_t i = 0; i < replies_.size(); ++i) add(replies_[i]);
    if (current_) add(*current_);
    return entries;
}

void QueuePair::close(double timeout_s) {
    later([timeout_s](QueuePair& self) {
        const State s = self.state_.load();
        if (s == State::idle || s == State::connecting || s == State::requested) return self.end(0, 0, Status::connect_failed);
        if (s != State::ready) return;
        self.set_deadline(timeout_s);
        {
            std::lock_guard lock(self.tx_mutex_);
            self.state_.store(State::closing);
            self.finishing_ = true;
            if (self.may_send_) {
                if (!self.write_armed_) self.pump_and_arm(0);
                return;
            }
        }
        self.end(0, 0, Status::ok);  // nothing may be said yet, and nothing is
    });
}

void QueuePair::abort() {
    later([](QueuePair& self) { self.end(0, 0, Status::ok); });
}

void QueuePair::end_now() {
    std::lock_guard lock(progress_mutex_);
    end(0, 0, Status::ok);
}

QueuePairStats QueuePair::stats() {
    std::lock_guard lock(tx_mutex_);
    count_retransmissions();
    stats_.stores_under_way = executor_ ? executor_->stores_under_way() : 0;
    return stats_;
}

// With tx_mutex_ held: what the kernel knows while the socket is there.
void QueuePair::count_retransmissions() {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (fd_ >= 0 && ::getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) == 0) stats_.retransmitted_segments = info.tcpi_total_retrans;
}

// --- a thread that waits -------------------------------------------------------------------------------------------------------

// A completion queue has its sole pair driven, connected or accepted (completion_queue.cpp). Where there are several, they are the device's
// business, whose threads serve all peers in turn.
bool QueuePair::begin_driving() {
    std::lock_guard lock(tx_mutex_);
    if (driven_ || !in_epoll_ || !is_reading()) return false;
    driven_ = true;
    watch_socket();
    return true;
}

void QueuePair::end_driving() {
    std::lock_guard lock(tx_mutex_);
    driven_ = false;
    if (fd_ >= 0 && in_epoll_) watch_socket();  // what came meanwhile is an event of the device's now
}

bool QueuePair::is_reading() const {
    const State s = state_.load();
    return reading_ && (s == State::ready || s == State::closing);
}

void QueuePair::drive(TimePoint until) {
    if (!begin_driving()) return;
    drive_on(until);
    end_driving();
}

void QueuePair::drive_on(TimePoint until) {
    spin_.begin(Clock::now());
    for (;;) {
        int fd = -1;
        bool moved = false;
        {
            progress_mutex_.lock_last();  // this is its eager user: the rest is soon done
            const std::lock_guard lock(progress_mutex_, std::adopt_lock);
            if (!is_reading()) break;
            const u64 before = stats_.bytes_received;
            receive();
            moved = stats_.bytes_received != before;
            fd = fd_;
        }
        const TimePoint now = Clock::now();
        if (moved) spin_.hit(now);
        if (cq_->has_news() || now >= until) break;
        if (spin_.again(now)) continue;
        const int news = cq_->begin_sleep();
        if (news < 0) break;
        // `fd` may be closed by now, and its number in use for something else: then the news are that this pair has ended.
        std::array<pollfd, 2> wanted{{{fd, POLLIN, 0}, {news, POLLIN, 0}}};
        const auto left =
            std::chrono::duration_cast<std::chrono::nanoseconds>(std::min<Clock::duration>(until - now, std::chrono::hours(1)));
        const timespec timeout{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
        ::ppoll(wanted.data(), wanted.size(), &timeout, nullptr);
        cq_->end_sleep();
        spin_.end();
    }
}

// --- progress -------------------------------------------------------------------------------------------------------------------

void QueuePair::watch_socket() { loop_.rearm(fd_, this, (reading_ && !driven_ ? EPOLLIN : 0u) | (write_armed_ ? EPOLLOUT : 0u)); }

void QueuePair::adopt(int fd, std::unique_ptr<CaptureStream> capture, std::string peer, wire::Startup request) {
    const std::scoped_lock lock(progress_mutex_, tx_mutex_, info_mutex_);
    if (state_.load() != State::idle) return socket_close(capture.get(), fd);  // the device was closed meanwhile
    fd_ = fd;
    capture_ = std::move(capture);
    peer_ = std::move(peer);
    peer_private_data_ = request.private_data;
    request_ = std::move(request);
    stats_.peer_ird = request_.ird;
    stats_.peer_ord = request_.ord;
    is_passive_ = true;
    state_.store(State::requested);
}

// The passive side's answer to the peer's Request; from here on it reads FPDUs.
void QueuePair::reply_to_request(std::vector<u8> private_data) {
    if (state_.load() != State::requested) return;
    wire::Startup reply;
    reply.is_reply = true;
    reply.revision = request_.revision;
    reply.crc = device_->options().crc;
    checks_crc_ = reply.crc || request_.crc;
    reply.enhanced = request_.enhanced;
    reply.private_data = std::move(private_data);
    if (reply.enhanced) {
        reply.peer_to_peer = request_.peer_to_peer;
        // Every kind of ready-to-receive frame is understood.
        reply.rtr_send = reply.rtr_write = reply.rtr_read = reply.peer_to_peer;
        ird_ = std::max<u16>(limits_.ird, 1);  // an empty Read may say that the peer is ready to receive
        reply.ird = request_.ord == wire::kNoNegotiation ? wire::kNoNegotiation : ird_;
        reply.ord = request_.ird == wire::kNoNegotiation ? wire::kNoNegotiation : std::min(limits_.ord, request_.ird);
        if (request_.ird != wire::kNoNegotiation) ord_ = std::min(ord_, request_.ird);
    }
    peer_to_peer_ = reply.peer_to_peer;
    inserts_markers_ = request_.markers;
    const std::vector<u8> frame = wire::encode_startup(reply);
    const ssize_t n = socket_send(capture_.get(), fd_, frame);
    if (n != static_cast<ssize_t>(frame.size())) return end(wire::error::tcp_lost.packed(), 0, Status::connect_failed);
    {
        std::lock_guard lock(tx_mutex_);
        in_epoll_ = true;
        loop_.watch(fd_, this, EPOLLIN);
    }
    set_deadline(limits_.startup_timeout_s);
    connected();
}

void QueuePair::on_event(u32 events) {
    const std::lock_guard progress(progress_mutex_);
    switch (state_.load()) {
        case State::connecting:
            if (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) on_tcp_connected();
            return;
        case State::requested:
            if (!is_passive_) read_reply();
            return;
        case State::idle:
        case State::dead:
            return;
        default:
            break;
    }
    if (events & EPOLLOUT) {
        std::lock_guard lock(tx_mutex_);
        pump_and_arm(0);
    }
    if (reading_ && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        receive();
    else if (events & (EPOLLHUP | EPOLLERR))  // both directions are shut: orderly if we had said all
        end(fin_sent_ ? 0 : wire::error::tcp_lost.packed(), 0, Status::ok);
}

void QueuePair::on_deadline() {
    const std::lock_guard progress(progress_mutex_);
    switch (state_.load()) {
        case State::connecting:
        case State::requested:
            return end(0, 0, Status::connect_failed);
        case State::terminating:
            return end(terminate_value_, 0, terminate_status_);
        case State::closing:
            return end(0, 0, Status::ok);
        case State::ready:  // the passive side waited for a first frame
            if (is_passive_ && !seen_frame_) end(wire::error::bad_startup.packed(), 0, Status::ok);
            return;
        default:
            return;
    }
}

// A name may have several addresses, and the peer may listen on one of them only.
void QueuePair::try_next_address() {
    while (!candidates_.empty()) {
        const Candidate next = candidates_.front();
        candidates_.pop_front();
        const int fd = ::socket(next.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd < 0) continue;
        if (::connect(fd, reinterpret_cast<const sockaddr*>(&next.address), next.size) == 0 || errno == EINPROGRESS) {
            std::lock_guard lock(tx_mutex_);
            fd_ = fd;
            in_epoll_ = true;
            loop_.watch(fd, this, EPOLLOUT);
            return;
        }
        ::close(fd);
    }
    end(0, 0, Status::connect_failed);
}

void QueuePair::on_tcp_connected() {
    int error = 0;
    socklen_t size = sizeof error;
    if (::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
        {
            std::lock_guard lock(tx_mutex_);
            loop_.unwatch(fd_);
            ::close(fd_);
            fd_ = -1;
            in_epoll_ = false;
        }
        return try_next_address();
    }
    configure_socket(fd_, device_->options().tcp);
    capture_ = device_->capture(fd_, true);
    wire::Startup request;
    request.crc = device_->options().crc;
    request.ird = limits_.ird;
    request.ord = limits_.ord;
    request.peer_to_peer = request.rtr_send = request.rtr_write = device_->options().peer_to_peer;
    request.private_data = startup_private_data_;
    const std::vector<u8> frame = wire::encode_startup(request);
    if (socket_send(capture_.get(), fd_, frame) != static_cast<ssize_t>(frame.size())) return end(0, 0, Status::connect_failed);
    state_.store(State::requested);
    loop_.rearm(fd_, this, EPOLLIN);
}

// The Reply, octet-exact: what follows it belongs to the first FPDU.
void QueuePair::read_reply() {
    if (staging_.empty()) staging_.resize(wire::kStartupHeader + wire::kMaxPrivateData);
    for (;;) {
        std::size_t want = wire::kStartupHeader;
        if (end_ >= wire::kStartupHeader) {
            const auto length =
                wire::startup_length(std::span<const u8, wire::kStartupHeader>(staging_.data(), wire::kStartupHeader), true);
            if (!length) return end(wire::error::bad_startup.packed(), 0, Status::connect_failed);
            want += *length;
            if (end_ == want) break;
        }
        const ssize_t n = socket_receive(capture_.get(), fd_, staging_.data() + end_, want - end_);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
        if (n <= 0) return end(wire::error::tcp_lost.packed(), 0, Status::connect_failed);
        end_ += static_cast<std::size_t>(n);
    }
    const auto reply = wire::decode_startup({staging_.data(), end_});
    staging_.clear();
    begin_ = end_ = 0;
    if (!reply) return end(wire::error::bad_startup.packed(), 0, Status::connect_failed);
    apply_reply(*reply);
}

void QueuePair::apply_reply(const wire::Startup& reply) {
    {
        std::lock_guard lock(info_mutex_);
        peer_private_data_ = reply.private_data;
    }
    {
        std::lock_guard lock(tx_mutex_);
        stats_.peer_ird = reply.ird;
        stats_.peer_ord = reply.ord;
    }
    if (reply.rejected) return end(0, completion_flag::remote, Status::connect_failed);
    // A peer that does not answer the enhanced request in kind can't be talked to.
    if (!reply.enhanced) return end(wire::error::bad_startup.packed(), 0, Status::connect_failed);
    seen_frame_ = true;
    checks_crc_ = reply.crc || device_->options().crc;
    deadline = TimePoint::max();
    std::optional<wire::TerminateCode> wrong;
    {
        std::lock_guard lock(tx_mutex_);
        may_send_ = true;
        inserts_markers_ = reply.markers;
        if (reply.ird != wire::kNoNegotiation) ord_ = std::min(ord_, reply.ird);
        if (reply.ord != wire::kNoNegotiation && reply.ord > limits_.ird) wrong = wire::error::low_ird;  // RFC 6581 section 9.1
        if (!wrong && device_->options().peer_to_peer && !say_ready(reply)) wrong = wire::error::no_common_rtr;
        halted_ = wrong.has_value();
        if (!wrong) {
            connected();
            pump_and_arm(0);
        }
    }
    if (!wrong) return;
    terminate_status_ = Status::connect_failed;
    fail(*wrong);
}

// Choose the frame that goes first and says that this side is ready to receive (RFC 6581 section 9.2); it is none of the ULP's business.
bool QueuePair::say_ready(const wire::Startup& reply) {
    if (!reply.peer_to_peer || (!reply.rtr_write && !reply.rtr_send)) return false;
    Message m;
    m.owner = Owner::ready;
    m.header.tagged = reply.rtr_write;
    m.header.opcode = reply.rtr_write ? wire::opcode::write : wire::opcode::send;
    if (!reply.rtr_write) m.header.msn = send_msn_++;
    current_ = std::move(m);
    return true;
}

void QueuePair::connected() {
    state_.store(State::ready);
    const Completion c{0, number_, Op::connected, Status::ok, 0, static_cast<u32>(peer_private_data().size()), 0, 0};
    cq_->push({&c, 1});
}

void QueuePair::on_end_of_stream() {
    peer_finished_ = true;
    if (state_.load() == State::terminating) return end(terminate_value_, 0, terminate_status_);
    const bool clean = begin_ == end_ && !direct_.active && !inbound_ && !write_open_;
    if (!clean || (is_passive_ && !seen_frame_)) return end(wire::error::tcp_lost.packed(), 0, Status::ok);
    // The peer has said all it will say. What is queued here may still go out (half-close), for a while.
    std::unique_lock lock(tx_mutex_);
    if (state_.load() == State::ready) set_deadline(2.0);
    state_.store(State::closing);
    finishing_ = true;
    stop_reading();
    pump_and_arm(0);  // ends the pair once its own FIN is out
}

// An ended stream stays readable for ever: stop asking.
void QueuePair::stop_reading() {
    reading_ = false;
    watch_socket();
}

// The last act, once: no memory is touched after it, every posted request has its completion, and DISCONNECTED is the last word.
void QueuePair::end(u64 value, u16 flags, Status status) {
    if (state_.load() == State::dead) return;
    const auto self = shared_from_this();
    flush_completions();
    {
        std::lock_guard lock(tx_mutex_);
        std::lock_guard receives(rq_mutex_);
        state_.store(State::dead);
        if (fd_ >= 0) {
            count_retransmissions();
            if (in_epoll_) loop_.unwatch(fd_);
            socket_close(capture_.get(), fd_);
            fd_ = -1;
        }
        flush_queues();
        cq_->push(withheld_);
        withheld_.clear();
        std::vector<Completion> flushed;
        if (inbound_) flushed.push_back({inbound_->buffer.request.wr_id, number_, Op::receive, inbound_->status, 0, 0, 0, 0});
        for (const Receive& r : receive_queue_) flushed.push_back({r.request.wr_id, number_, Op::receive, Status::flushed, 0, 0, 0, 0});
        receive_queue_.clear();
        flushed.push_back({0, number_, Op::disconnected, status, flags, 0, 0, value});
        cq_->push(flushed);
        pool_.reset();
    }
    inbound_.reset();
    direct_ = Direct{};
    write_region_.reset();
    foretold_.clear();
    deadline = TimePoint::max();
    device_->forget(*this);
}

}  // namespace kbtp
