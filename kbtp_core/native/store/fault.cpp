#include "fault.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>

namespace kbtp::store {

int error_of(const Fault& fault) {
    if (fault.action == FaultAction::no_space) return ENOSPC;
    if (fault.action == FaultAction::read_only) return EROFS;
    return fault.action == FaultAction::io_error ? EIO : 0;
}

Faults::Faults(std::vector<Fault> plan)
    : plan_(std::move(plan)), loses_power_(std::ranges::any_of(plan_, [](const Fault& f) { return f.action == FaultAction::lose; })) {}

void Faults::die() {
    ::kill(::getpid(), SIGKILL);
    for (;;) ::pause();
}

Fault Faults::visit(FaultPoint point, bool may_sleep) {
    const u64 number = visits_[static_cast<std::size_t>(point)].fetch_add(1, std::memory_order_relaxed) + 1;
    for (const Fault& fault : plan_) {
        if (fault.point != point || (fault.visit != 0 && fault.visit != number)) continue;
        if (fault.action == FaultAction::lose) unsynced_.take_back(fault.amount);
        if (fault.action == FaultAction::kill || fault.action == FaultAction::lose) die();
        if (fault.action == FaultAction::hang && may_sleep) std::this_thread::sleep_for(std::chrono::milliseconds(fault.amount));
        return fault;
    }
    return {};
}

}  // namespace kbtp::store
