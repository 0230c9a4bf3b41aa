#include "whole_call.hpp"

namespace kbtp {

WholeCall::Result WholeCall::begin(std::shared_ptr<RequestBatch> batch) {
    is_driving_ = pair_->begin_driving();
    if (pair_->post_batch(batch) == QueuePair::Posted::ok) {
        batch_ = std::move(batch);
        return Result::interrupted;
    }
    stop_driving();
    return Result::refused;
}

void WholeCall::stop_driving() {
    if (std::exchange(is_driving_, false)) pair_->end_driving();
}

bool WholeCall::has_ended() {
    return pair_->read_batch([&] { return batch_->is_done(); });
}

WholeCall::Result WholeCall::resume(TimePoint until) {
    CompletionQueue& completions = pair_->completions();
    is_driving_ = is_driving_ || pair_->begin_driving();
    // Its completion may have been taken by who polled that queue.
    bool is_over = completions.take_load(batch_->sequence()) || has_ended();
    for (TimePoint now = Clock::now(); !is_over && now < until && !completions.has_news(); now = Clock::now()) {
        if (is_driving_)
            pair_->drive_on(until);
        else
            completions.wait(std::chrono::duration<double>(until - now).count());
        is_over = completions.take_load(batch_->sequence()) || has_ended();
    }
    stop_driving();
    completions.forget_wake();
    if (!is_over) return Result::interrupted;
    ended_ = std::exchange(batch_, nullptr);
    return Result::done;
}

void WholeCall::abandon() {
    if (!batch_) return;
    pair_->abandon_batch(batch_);
    ended_ = std::exchange(batch_, nullptr);
}

}  // namespace kbtp
