// A batch of the requester that its caller waits for at once: he drives the queue pair himself from before it is posted, so that no other
// thread is woken for an early answer.
//
// One thread at a time waits on a completion queue (session/initiator.py sees to that). Sequence numbers of such batches have their top bit
// set, and those of LOADs alone the next one, too; those of the session's own batches have neither.
#pragma once

#include <memory>
#include <utility>

#include "queue_pair.hpp"
#include "requester.hpp"

namespace kbtp {

class WholeCall {
  public:
    enum class Result : u8 {
        refused,      // not the usual case; of a put nothing has happened
        done,         // every value was found, or stored
        interrupted,  // something else has come, or time is over: `resume`, or `abandon`
        partly        // not every value was there, or stored
    };

    explicit WholeCall(std::shared_ptr<QueuePair> pair) : pair_(std::move(pair)) {}
    WholeCall(const WholeCall&) = delete;
    WholeCall& operator=(const WholeCall&) = delete;

    bool is_running() const { return batch_ != nullptr; }
    // Post a batch: `refused` if the pair has ended, else `interrupted`.
    Result begin(std::shared_ptr<RequestBatch> batch);
    // Drive the pair until the batch is answered: `done`, and `ended` has it.
    Result resume(TimePoint until);
    // What was answered until now is all there is; `ended` has the batch.
    void abandon();
    std::shared_ptr<RequestBatch> ended() { return std::exchange(ended_, nullptr); }

  private:
    bool has_ended();
    void stop_driving();

    const std::shared_ptr<QueuePair> pair_;
    std::shared_ptr<RequestBatch> batch_, ended_;
    bool is_driving_ = false;
};

inline constexpr u32 kCallSequences = 0x8000'0000, kLoadCallSequences = 0xc000'0000, kSequenceMask = 0x3fff'ffff;

}  // namespace kbtp
