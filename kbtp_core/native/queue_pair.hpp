// One RDMAP stream: a TCP connection, its queues, and the state machine that moves data between registered memory and the socket.
//
//      connect ----------> connecting --TCP up, Request sent--> requested --Reply--\.
//                                                                                   ready --close or FIN--> closing --.
//      accept (Request read by the listener, Reply sent) --------------------------/   \--error--> terminating ------- dead
//
// Threads. The receive half (qp_receive.cpp) and every change of `state_` are under `progress_mutex_`. Usually the pair's progress thread
// (loop.hpp) takes it, which is the same for the pair's whole life; while a thread waits for this pair's completion queue, that thread asks
// the socket itself (`drive`), and the loop watches the socket only for errors and room. The transmit half (qp_transmit.cpp) is under
// `tx_mutex_` and may be driven by the thread that posts, so that a small request leaves without a thread hop.
// Lock order: progress_mutex_, then tx_mutex_ or rq_mutex_, then locks of regions, the device and completion queues, which are leaves.
//
// Rules:
// 1. Frames leave whole and in order: `burst_` is what the socket is being given; nothing else writes to the socket until it is gone.
// 2. A frame's CRC, unless both sides do without, is good before a header field in it is believed. Only a segment that goes exactly
//    where the previous one of its message (or an outstanding Read, or a posted receive) says it must is placed while it still arrives.
// 3. The passive side sends nothing before it has seen one good frame (RFC 5044 section 7.1.2).
// 4. After an error of the peer there is one more frame: the Terminate.
#pragma once

#include <sys/socket.h>

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "completion_queue.hpp"
#include "counters.hpp"
#include "executor_session.hpp"
#include "fifo.hpp"
#include "loop.hpp"
#include "polite_mutex.hpp"
#include "region.hpp"
#include "requester.hpp"
#include "spin.hpp"
#include "wire.hpp"

namespace kbtp {

class Device;

class QueuePair : public Pollable, public Drivable, public std::enable_shared_from_this<QueuePair> {
  public:
    enum class State : u8 { idle, connecting, requested, ready, closing, terminating, dead };
    enum class Posted : u8 { ok, full, closed, no_such_op, no_requests };

    QueuePair(std::shared_ptr<Device> device, Loop& loop, u32 number, u32 pd, std::shared_ptr<CompletionQueue> cq, QueueLimits limits);
    ~QueuePair() override;

    // --- any thread -------------------------------------------------------------------------------------------------------
    u32 number() const { return number_; }
    u32 pd() const { return pd_; }
    RegionTable& regions() const;
    CompletionQueue& completions() const { return *cq_; }
    std::string peer() const;
    std::vector<u8> peer_private_data() const;
    void connect(const std::string& host, u16 port, std::vector<u8> private_data);
    void accept(std::vector<u8> private_data);
    Posted post_send(std::span<const WorkRequest> requests);
    Posted post_receive(std::span<const ReceiveRequest> requests);
    // Table entries whose blocks native LOADs of this pair still read.
    std::vector<u64> reading();
    void attach_executor(std::shared_ptr<Executor> executor, RegionPtr pool, std::optional<StoreGrant> grant);
    // Requests that the requester sends; `credits` is how many may be outstanding at once. A batch ends in one completion.
    void enable_loads(u32 credits);
    Posted post_batch(std::shared_ptr<RequestBatch> batch);
    void abandon_batch(const std::shared_ptr<RequestBatch>& batch);
    // What a batch of this pair has by now.
    template <class Read>
    auto read_batch(Read&& read) {
        std::lock_guard lock(tx_mutex_);
        return read();
    }
    u64 unsent_loads();
    // An answer that came in several segments, and so went up; false if it answers nothing that a batch asked.
    bool settle(std::span<const u8> answer);
    void close(double timeout_s);
    void abort();
    // As `abort`, but when it returns nothing of this pair touches memory any more, nor its executor's state.
    void end_now();
    QueuePairStats stats();
    void drive(TimePoint until) override;
    // The same in steps, for who begins before he posts what he will wait for. False: it can't be done here and now.
    bool begin_driving();
    void drive_on(TimePoint until);
    void end_driving();
    // Passive side, once, before `accept`: take over the listener's socket and the peer's Request.
    void adopt(int fd, std::unique_ptr<CaptureStream> capture, std::string peer, wire::Startup request);

    // --- progress thread --------------------------------------------------------------------------------------------------
    void on_event(u32 events) override;
    void on_deadline() override;

  private:
    // --- transmit half, under tx_mutex_ --------------------------------------------------------------------------------------
    enum class Owner : u8 { work_request, response, executor_write, executor_read, executor_reply, load_request, ready, terminate };
    struct Message {  // one DDP message on its way out
        wire::Segment header;
        RegionPtr source;                               // or, when null, `octets` from source_offset on
        std::shared_ptr<const std::vector<u8>> octets;  // or, when null, too, `inline_data`
        u64 source_offset = 0;
        u32 length = 0, sent = 0;
        std::array<u8, 64> inline_data{};
        bool snapshot = false;
        Owner owner = Owner::work_request;
        u64 owner_id = 0;  // send queue index, or table entry
        const u8* own_octets() const { return octets ? octets->data() + source_offset : inline_data.data(); }
    };
    enum class EntryState : u8 { queued, awaiting_response, done };
    struct SendEntry {
        WorkRequest request;
        RegionPtr local;
        EntryState state = EntryState::queued;
        Status status = Status::ok;
        u64 value = 0;
        bool bad_local = false;
    };
    struct Outstanding {  // a Read or atomic that the peer has to answer
        u64 send_index;   // or, of an executor's Read, the table entry
        bool is_atomic;
        u32 atomic_id, sink_stag;
        u64 sink_offset;
        u32 length, received;
        RegionPtr sink;
        bool is_executors = false;
    };
    struct Burst {  // frames that the socket is being given
        IoVectors pieces;
        std::size_t next = 0;  // first piece not wholly sent
        std::size_t arena_used = 0, copy_used = 0, payload_bytes = 0, fpdus = 0;
        std::vector<RegionPtr> regions;      // whose memory `pieces` names
        std::vector<Message> finished;       // messages whose last octet is in here
        std::deque<std::vector<u8>> marked;  // frames with markers, for a peer that asks for them
        bool empty() const { return next == pieces.size(); }
    };
    enum class Pumped : u8 { idle, blocked, more, broken };

    Pumped pump(std::size_t budget);
    void pump_and_arm(std::size_t budget);
    void build_burst();
    bool ends_with_data() const;
    bool take_next();
    bool take_work_request();
    bool take_load();
    bool take_store();
    bool append_segment(Message& message);
    void append_marked(Message& message, u32 n);
    void gather_payload(Message& message, u32 n, u8* head, std::size_t& used, u32& crc);
    u32 sum(u32 crc, const void* data, std::size_t size) const;
    const void* next_source() const;
    void source_gone(Message& message);
    void halt();
    Pumped send_burst();
    void finish_burst();
    void retire();
    void request_answered(Status status, u64 value);
    void flush_queues();
    void arm_write(bool wanted);
    void fail_transmit(u64 value);
    void count_retransmissions();
    bool drained() const {
        return burst_.empty() && !current_ && load_queue_.empty() && replies_.empty() && stores_.empty() &&
               sent_to_ == send_base_ + send_queue_.size();
    }
    SendEntry& entry(u64 index) { return send_queue_[index - send_base_]; }
    static Message message_for(const SendEntry& entry);

    // --- progress, under progress_mutex_ ------------------------------------------------------------------------------------------
    // Run `task(*this)` on the progress thread, soon. False, and dropped, once the device is closed.
    template <class Task>
    bool later(Task task) {
        return loop_.submit([self = shared_from_this(), task = std::move(task)]() mutable {
            const std::lock_guard lock(self->progress_mutex_);
            task(*self);
        });
    }
    bool is_reading() const;
    void watch_socket();  // with tx_mutex_ held
    void end(u64 value, u16 flags, Status status);

    // --- receive half, under progress_mutex_ ------------------------------------------------------------------------------------
    struct Receive {
        ReceiveRequest request;
        RegionPtr region;
    };
    struct Inbound {  // the Send that is arriving
        Receive buffer;
        u8 opcode;
        u32 stag, received = 0;
        Status status = Status::flushed;  // what `end` reports if the rest never comes
    };
    struct Placement {
        RegionPtr region;  // null where there is nothing to place
        u64 offset = 0;
    };
    struct Direct {  // a payload that goes straight from the socket to its place
        bool active = false;
        wire::Segment segment;
        Placement at;
        std::array<u8, wire::kLengthField + wire::kUntaggedHeader> head{};
        u32 ulpdu = 0, payload = 0, placed = 0, crc = 0;
    };

    void receive();
    std::ptrdiff_t fill();
    std::ptrdiff_t fill_direct();
    void parse();
    void parse_frames();
    bool start_direct(u32 ulpdu, std::size_t available);
    bool finish_direct();
    void take_frame(const u8* frame, u32 ulpdu);
    void may_answer();
    bool place(const wire::Segment& segment, const Placement& at, const u8* payload, u32 n);
    void place_gone(const wire::Segment& segment);

    // Check a segment against every rule and say where its payload goes; fails the stream otherwise.
    std::optional<Placement> admit(const wire::Segment& segment, u32 n);
    std::optional<wire::TerminateCode> check_kind(const wire::Segment& segment) const;
    std::optional<wire::TerminateCode> check_write(const wire::Segment& segment, u32 n);
    std::optional<wire::TerminateCode> admit_write(const wire::Segment& segment, u32 n, Placement& at);
    std::optional<wire::TerminateCode> admit_read_response(const wire::Segment& segment, u32 n, Placement& at);
    std::optional<wire::TerminateCode> admit_send(const wire::Segment& segment, u32 n, Placement& at);
    bool goes_as_foretold(const wire::Segment& segment, u32 n);
    bool answers_next_load(const wire::Segment& segment, u32 n);
    bool take_foretold(const u8* frame, u32 ulpdu, u32 crc_sent);
    // The payload is in place and its CRC was good.
    void placed(const wire::Segment& segment, const u8* payload, u32 n);
    void deliver_send(const wire::Segment& segment, const u8* payload);
    bool invalidate_for_peer(const wire::Segment& segment);
    void on_read_response(const wire::Segment& segment, u32 n);
    void on_read_request(const wire::Segment& segment, const u8* payload);
    void on_atomic_request(const wire::Segment& segment, const u8* payload);
    void on_atomic_response(const wire::Segment& segment, const u8* payload);
    void on_terminate(const u8* payload, u32 n);
    bool may_be_answer(const wire::Segment& segment, const u8* payload, u32 n) const;
    void forget_foretold(std::span<const u8> answer);
    void foretell();
    void settle_answers();
    void hand_up(const u8* frame);
    bool take_answer(std::span<const u8> answer);
    bool answered(const std::shared_ptr<RequestBatch>& batch);
    bool execute(const wire::Segment& segment, const u8* payload, u32 n);
    bool execute_received(const wire::Segment& segment);
    bool execute_whole(std::span<const u8> message, std::size_t taken);
    void execute(const Work& work);
    void settled();
    std::optional<wire::TerminateCode> check_source(u32 stag, u64 offset, u64 size, u8 right, RegionPtr& out) const;
    void fail(wire::TerminateCode code);
    void stop_reading();
    void on_end_of_stream();
    void push_later(const Completion& completion) { pending_.push_back(completion); }
    void flush_completions();

    // --- start-up, progress thread, under progress_mutex_ ------------------------------------------------------------------------
    void reply_to_request(std::vector<u8> private_data);
    void try_next_address();
    void on_tcp_connected();
    void read_reply();
    void apply_reply(const wire::Startup& reply);
    bool say_ready(const wire::Startup& reply);
    void connected();
    void set_deadline(double seconds);
    bool is_open() const;

    const std::shared_ptr<Device> device_;
    Loop& loop_;  // the device's
    const u32 number_, pd_;
    const std::shared_ptr<CompletionQueue> cq_;
    const QueueLimits limits_;

    PoliteMutex progress_mutex_;             // guards the receive half, and the right to change state_
    std::atomic<State> state_{State::idle};  // written under progress_mutex_ and, but for start-up, tx_mutex_
    int fd_ = -1;                            // closed under tx_mutex_
    bool in_epoll_ = false;
    std::unique_ptr<CaptureStream> capture_;  // set before the first octet moves, closed with fd_

    mutable std::mutex info_mutex_;  // guards the two below
    std::string peer_;
    std::vector<u8> peer_private_data_;

    std::mutex tx_mutex_;  // guards the transmit half
    std::deque<SendEntry> send_queue_;
    u64 send_base_ = 0, sent_to_ = 0;  // indices of the first entry, and of the first not yet taken for sending
    Fifo<Message> replies_;            // Read and atomic responses, executor answers
    std::optional<Message> current_, terminate_;
    Burst burst_;
    std::vector<u8> arena_, copy_arena_;
    std::deque<Outstanding> outstanding_;
    u32 send_msn_ = 1, request_msn_ = 1, atomic_response_msn_ = 1, next_atomic_id_;
    u16 ird_, ord_;  // as negotiated
    u32 inbound_requests_ = 0, executor_replies_ = 0;
    bool may_send_ = false;         // see rule 3
    bool checks_crc_ = true;        // frames have CRCs, both ways; settled before may_send_ and before the first frame is read
    bool inserts_markers_ = false;  // the peer wants them
    u64 stream_position_ = 0;       // octets sent since the start-up frames; kept only with markers
    bool write_armed_ = false;      // the progress thread waits for the socket to take more
    bool prefer_replies_ = false;
    bool halted_ = false;     // nothing but the Terminate is sent any more
    bool broken_ = false;     // the socket or a source failed; `end` is on its way
    bool finishing_ = false;  // FIN once everything is sent
    bool fin_sent_ = false;
    bool reading_ = true;
    bool driven_ = false;  // a thread that waits asks the socket for octets, not the device
    Spin spin_;            // of that thread
    QueuePairStats stats_;
    bool request_stalls_ = false, store_stalls_ = false;    // the next one waits for ORD, and is counted
    std::deque<std::shared_ptr<RequestBatch>> load_queue_;  // batches with requests not sent yet
    std::unordered_map<u32, std::shared_ptr<RequestBatch>> loads_;
    Fifo<ExpectedWrite> expected_writes_;  // of outstanding LOADs, in the order they were sent
    u32 load_credits_ = 0, loads_outstanding_ = 0;
    std::optional<ExecutorSession> executor_;
    std::deque<Work> stores_;           // of the executor, whose data is still to be asked for
    std::vector<Completion> withheld_;  // messages for the software target that come behind unsettled operations
    RegionPtr pool_;

    std::mutex rq_mutex_;  // guards the two below
    std::deque<Receive> receive_queue_;
    u32 upcalls_ = 0;  // messages handed up since the executor was attached whose buffers were not posted again

    // Receive half.
    std::vector<u8> staging_;
    IoVectors pieces_;      // of the payload that is being placed
    bool ran_dry_ = false;  // the last read got less than there was room for
    std::size_t begin_ = 0, end_ = 0;
    Direct direct_;
    std::optional<Inbound> inbound_;
    bool write_open_ = false;  // a Write has begun and not ended: its next segment is foretold by the two below
    u32 write_stag_ = 0;
    u64 write_next_ = 0;
    RegionPtr write_region_;          // of the last Write
    RegionPtr pinned_;                // where the Writes of the fast path go
    Fifo<ExpectedWrite> foretold_;    // taken from expected_writes_
    std::vector<const u8*> answers_;  // frames in the staging buffer: answers that were not matched yet
    u32 expected_send_msn_ = 1, expected_request_msn_ = 1, expected_atomic_msn_ = 1;
    bool seen_frame_ = false, peer_to_peer_ = false, is_passive_ = false, replies_waiting_ = false;
    std::atomic<bool> peer_finished_{false}, has_executor_{false}, has_requester_{false};
    Status terminate_status_ = Status::ok;
    u64 terminate_value_ = 0;    // what DISCONNECTED will say once the Terminate is out
    const u8* frame_ = nullptr;  // the frame that is being judged, for the Terminate to quote
    u32 frame_ulpdu_ = 0;
    std::vector<Completion> pending_;
    struct Candidate {
        sockaddr_storage address{};
        socklen_t size = 0;
    };
    std::deque<Candidate> candidates_;  // addresses not tried yet
    std::vector<u8> startup_private_data_;
    wire::Startup request_;
};

}  // namespace kbtp
