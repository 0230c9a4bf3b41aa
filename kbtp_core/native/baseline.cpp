// The plain loops that `kbtp bench` compares against: what this machine does without any protocol.
//
// Nothing here is used by the product. Rules:
// 1. A baseline is as fast as plain sockets allow: few system calls, no framing, no checksum, no bookkeeping.
// 2. Memory is walked through from end to end, so that a working set larger than the caches stays as cold as the product's.
// 3. Every function runs without the GIL, on blocking sockets that the caller made and keeps; an error or an early end of
//    the connection throws.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace nb = nanobind;

namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Times = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Clock = std::chrono::steady_clock;

constexpr size_t kHeaderBytes = 40;  // of a request and of a reply, as LOAD and COMPLETION have

// One request and one reply header. Only `offset` and `length` mean anything; the rest is there for its size.
struct Header {
    uint64_t id;
    uint64_t offset;  // of the block in the server's pool
    uint64_t length;
    uint64_t unused[2];
};
static_assert(sizeof(Header) == kHeaderBytes);

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// Takes `done` octets off the front of `parts`; changes them.
void consume(std::span<iovec>& parts, size_t done) {
    while (!parts.empty() && done >= parts[0].iov_len) {
        done -= parts[0].iov_len;
        parts = parts.subspan(1);
    }
    if (done) {
        parts[0].iov_base = static_cast<uint8_t*>(parts[0].iov_base) + done;
        parts[0].iov_len -= done;
    }
}

// Sends all of `parts`; changes them.
void send_all(int fd, std::span<iovec> parts) {
    while (!parts.empty()) {
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = std::min<size_t>(parts.size(), 1024);
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) fail("send");
        consume(parts, static_cast<size_t>(sent));
    }
}

// Receives what is there, at least one octet; 0 is the end of the stream.
size_t receive_some(int fd, uint8_t* into, size_t room) {
    for (;;) {
        ssize_t got = recv(fd, into, room, 0);
        if (got >= 0) return static_cast<size_t>(got);
        if (errno != EINTR) fail("receive");
    }
}

void receive_all(int fd, uint8_t* into, size_t bytes) {
    while (bytes) {
        size_t got = receive_some(fd, into, bytes);
        if (!got) throw std::runtime_error("the peer of the baseline closed its connection early");
        into += got;
        bytes -= got;
    }
}

uint64_t nanoseconds_since(Clock::time_point start) {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
}

// Sends `total` octets in writes of `write_bytes` (at most), walking through `memory`.
void stream_send(int fd, Bytes memory, uint64_t total, size_t write_bytes) {
    nb::gil_scoped_release release;
    size_t at = 0;
    while (total) {
        size_t step = std::min<uint64_t>({write_bytes, memory.size() - at, total});
        iovec part{memory.data() + at, step};
        send_all(fd, {&part, 1});
        total -= step;
        at = (at + step) % memory.size();
    }
}

// Receives `total` octets into `memory`, walking through it.
void stream_receive(int fd, Bytes memory, uint64_t total, size_t read_bytes) {
    nb::gil_scoped_release release;
    size_t at = 0;
    while (total) {
        size_t got = receive_some(fd, memory.data() + at, std::min<uint64_t>({read_bytes, memory.size() - at, total}));
        if (!got) throw std::runtime_error("the sender of the baseline closed its connection early");
        total -= got;
        at = (at + got) % memory.size();
    }
}

// Answers requests from `pool` until the client closes: all requests that one receive brought are answered by one send,
// whose blocks the kernel copies straight from the pool.
void serve_loads(int fd, Bytes pool) {
    nb::gil_scoped_release release;
    std::vector<Header> requests(512), replies(512);
    std::vector<iovec> parts;
    size_t filled = 0;  // octets in `requests`
    while (size_t got = receive_some(fd, reinterpret_cast<uint8_t*>(requests.data()) + filled, requests.size() * kHeaderBytes - filled)) {
        filled += got;
        size_t whole = filled / kHeaderBytes;
        parts.clear();
        for (size_t i = 0; i < whole; i++) {
            const Header& request = requests[i];
            if (request.length > pool.size() || request.offset > pool.size() - request.length)
                throw std::runtime_error("a request of the baseline is outside of its pool");
            replies[i] = request;
            parts.push_back({&replies[i], kHeaderBytes});
            parts.push_back({pool.data() + request.offset, request.length});
        }
        send_all(fd, parts);
        filled -= whole * kHeaderBytes;
        std::memmove(requests.data(), requests.data() + whole, filled);
    }
}

// Receives into all of `parts`; changes them.
void receive_parts(int fd, std::span<iovec> parts) {
    while (!parts.empty()) {
        ssize_t got = readv(fd, parts.data(), static_cast<int>(std::min<size_t>(parts.size(), 1024)));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) fail("receive");
        if (got == 0) throw std::runtime_error("the peer of the baseline closed its connection early");
        consume(parts, static_cast<size_t>(got));
    }
}

// Asks for `batch` blocks in one send, waits for all, and so on for `seconds` or until `times` is full. `offsets` are the
// blocks' places in the server's pool, taken in turn; each block is received into its own place in `sink`, which is walked through,
// as KBTP's are. Writes the nanoseconds of each batch; returns how many it wrote.
size_t run_loads(int fd, Bytes sink, Times offsets, size_t block_bytes, size_t batch, double seconds, Times times) {
    nb::gil_scoped_release release;
    std::vector<Header> requests(batch), replies(batch);
    std::vector<iovec> parts;
    size_t next = 0, done = 0, place = 0;
    const auto start = Clock::now();
    const auto limit = static_cast<uint64_t>(seconds * 1e9);
    while (done < times.size() && nanoseconds_since(start) < limit) {
        const auto begun = Clock::now();
        parts.clear();
        for (size_t i = 0; i < batch; i++) {
            requests[i] = {.id = done, .offset = offsets.data()[next], .length = block_bytes, .unused = {}};
            next = next + 1 == offsets.size() ? 0 : next + 1;
            if (place + block_bytes > sink.size()) place = 0;
            parts.push_back({&replies[i], kHeaderBytes});
            parts.push_back({sink.data() + place, block_bytes});
            place += block_bytes;
        }
        iovec part{requests.data(), batch * kHeaderBytes};
        send_all(fd, {&part, 1});
        receive_parts(fd, parts);
        times.data()[done++] = nanoseconds_since(begun);
    }
    return done;
}

// Reads exactly what is asked for straight to its place, and takes along what the socket has beyond that.
class Reader {
  public:
    explicit Reader(int fd) : fd_(fd), ahead_(size_t{256} * 1024) {}

    // False at the end of the stream.
    bool read(uint8_t* into, size_t bytes) {
        size_t here = std::min(bytes, end_ - begin_);
        std::memcpy(into, ahead_.data() + begin_, here);
        begin_ += here;
        for (size_t done = here; done < bytes;) {
            iovec parts[] = {{into + done, bytes - done}, {ahead_.data(), ahead_.size()}};
            ssize_t got = readv(fd_, parts, 2);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) fail("receive");
            if (got == 0) return false;
            begin_ = 0;
            end_ = done + static_cast<size_t>(got) > bytes ? done + static_cast<size_t>(got) - bytes : 0;
            done += static_cast<size_t>(got) - end_;
        }
        return true;
    }

  private:
    int fd_;
    std::vector<uint8_t> ahead_;
    size_t begin_ = 0, end_ = 0;  // what is in `ahead_`
};

// Stores: requests carry their blocks; the answers of a batch share one send. `id` is the count of requests in the batch.
void serve_stores(int fd, Bytes pool) {
    nb::gil_scoped_release release;
    Reader reader(fd);
    std::vector<Header> replies;
    Header request{};
    while (reader.read(reinterpret_cast<uint8_t*>(&request), kHeaderBytes)) {
        if (request.length > pool.size() || request.offset > pool.size() - request.length)
            throw std::runtime_error("a request of the baseline is outside of its pool");
        if (!reader.read(pool.data() + request.offset, request.length)) return;
        replies.push_back(request);
        if (replies.size() < request.id) continue;
        iovec part{replies.data(), replies.size() * kHeaderBytes};
        send_all(fd, {&part, 1});
        replies.clear();
    }
}

// Stores `batch` blocks of `source` in one send, waits for all answers, and so on as `run_loads` does.
size_t run_stores(int fd, Bytes source, Times offsets, size_t block_bytes, size_t batch, double seconds, Times times) {
    nb::gil_scoped_release release;
    std::vector<Header> requests(batch), replies(batch);
    std::vector<iovec> parts;
    size_t next = 0, done = 0;
    const auto start = Clock::now();
    const auto limit = static_cast<uint64_t>(seconds * 1e9);
    while (done < times.size() && nanoseconds_since(start) < limit) {
        const auto begun = Clock::now();
        parts.clear();
        for (size_t i = 0; i < batch; i++) {
            uint64_t offset = offsets.data()[next];
            if (offset + block_bytes > source.size()) throw std::runtime_error("a block of the baseline is outside of its source");
            requests[i] = {.id = batch, .offset = offset, .length = block_bytes, .unused = {}};
            parts.push_back({&requests[i], kHeaderBytes});
            parts.push_back({source.data() + offset, block_bytes});
            next = next + 1 == offsets.size() ? 0 : next + 1;
        }
        send_all(fd, parts);
        receive_all(fd, reinterpret_cast<uint8_t*>(replies.data()), batch * kHeaderBytes);
        times.data()[done++] = nanoseconds_since(begun);
    }
    return done;
}

// Sends back what comes, `bytes` at a time, until the client closes.
void serve_echo(int fd, size_t bytes) {
    nb::gil_scoped_release release;
    std::vector<uint8_t> message(bytes);
    while (size_t got = receive_some(fd, message.data(), bytes)) {
        receive_all(fd, message.data() + got, bytes - got);
        iovec part{message.data(), bytes};
        send_all(fd, {&part, 1});
    }
}

// Sends `bytes` and waits until they come back, and so on for `seconds` or until `times` is full; returns how many times it wrote.
size_t run_echo(int fd, size_t bytes, double seconds, Times times) {
    nb::gil_scoped_release release;
    std::vector<uint8_t> message(bytes);
    size_t done = 0;
    const auto start = Clock::now();
    const auto limit = static_cast<uint64_t>(seconds * 1e9);
    while (done < times.size() && nanoseconds_since(start) < limit) {
        const auto begun = Clock::now();
        iovec part{message.data(), bytes};
        send_all(fd, {&part, 1});
        receive_all(fd, message.data(), bytes);
        times.data()[done++] = nanoseconds_since(begun);
    }
    return done;
}

// Copies `source` to `sink` in steps until `seconds` are over; returns octets copied.
uint64_t copy(Bytes source, Bytes sink, size_t step, double seconds) {
    nb::gil_scoped_release release;
    const size_t room = std::min(source.size(), sink.size()) / step * step;
    if (!room) throw std::runtime_error("the memory to copy is shorter than one step");
    const auto start = Clock::now();
    const auto limit = static_cast<uint64_t>(seconds * 1e9);
    uint64_t copied = 0;
    for (size_t at = 0; nanoseconds_since(start) < limit; at = (at + step) % room) {
        std::memcpy(sink.data() + at, source.data() + at, step);
        copied += step;
    }
    return copied;
}

}  // namespace

NB_MODULE(_baseline, m) {
    using namespace nb::literals;
    m.doc() = "Plain loops that `kbtp bench` compares against.";
    m.def("stream_send", &stream_send, "fd"_a, "memory"_a, "total"_a, "write_bytes"_a);
    m.def("stream_receive", &stream_receive, "fd"_a, "memory"_a, "total"_a, "read_bytes"_a);
    m.def("serve_loads", &serve_loads, "fd"_a, "pool"_a);
    m.def("run_loads", &run_loads, "fd"_a, "sink"_a, "offsets"_a, "block_bytes"_a, "batch"_a, "seconds"_a, "times"_a);
    m.def("serve_stores", &serve_stores, "fd"_a, "pool"_a);
    m.def("run_stores", &run_stores, "fd"_a, "source"_a, "offsets"_a, "block_bytes"_a, "batch"_a, "seconds"_a, "times"_a);
    m.def("serve_echo", &serve_echo, "fd"_a, "bytes"_a);
    m.def("run_echo", &run_echo, "fd"_a, "bytes"_a, "seconds"_a, "times"_a);
    m.def("copy", &copy, "source"_a, "sink"_a, "step"_a, "seconds"_a);
}
