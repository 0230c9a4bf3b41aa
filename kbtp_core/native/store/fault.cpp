#include "fault.hpp"

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

namespace kbtp::store {

void Faults::die() {
    ::kill(::getpid(), SIGKILL);
    for (;;) ::pause();
}

Fault Faults::visit(FaultPoint point) {
    const u64 number = visits_[static_cast<std::size_t>(point)].fetch_add(1, std::memory_order_relaxed) + 1;
    for (const Fault& fault : plan_) {
        if (fault.point != point || (fault.visit != 0 && fault.visit != number)) continue;
        if (fault.action == FaultAction::kill) die();
        if (fault.action == FaultAction::hang) std::this_thread::sleep_for(std::chrono::milliseconds(fault.amount));
        return fault;
    }
    return {};
}

}  // namespace kbtp::store
