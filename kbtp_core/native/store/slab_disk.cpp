#include "slab_disk.hpp"

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace kbtp::store {
namespace {

constexpr u32 kChunk = u32{1} << 20;                                   // octets that a thread moves at a time
constexpr u64 kRingBatch = u64{4} << 20, kRingValue = u64{128} << 10;  // octets; larger batches of larger values go to the threads
constexpr std::size_t kRingsKept = 16;
constexpr u32 kReadErrorsMost = 16;  // in a row; a single bad sector does not take the disk out of service

// Runs `use` on the caller's memory; ETIMEDOUT if the caller went away.
template <class Use>
int touching(IoBatch& batch, Use&& use) {
    if (!batch.touch()) return ETIMEDOUT;
    use();
    batch.let_go();
    return 0;
}

int read_one(const DiskFile& file, Transfer& t, IoBatch& batch, Bounce& bounce) {
    const u32 begin = t.read_begin(), end = t.read_end();
    u8* room = bounce.room(std::min(kChunk, whole_units(end - begin)));
    for (u32 at = begin; at < end; at += kChunk) {
        const u32 size = std::min(kChunk, end - at);
        if (const int error = file.read(FaultPoint::payload_read, room, whole_units(size), t.payload + at)) return error;
        if (const int error = touching(batch, [&] { t.take(room, at, size); })) return error;
    }
    crc32c_copy_fence();
    return 0;
}

int write_one(const DiskFile& file, const Transfer& t, IoBatch& batch, Bounce& bounce) {
    u32 at = 0;
    if (reinterpret_cast<std::uintptr_t>(t.address) % kUnit == 0) {
        at = t.length & ~(kUnit - 1);  // whole units go from where they are
        if (at > 0)
            if (const int error = file.write(FaultPoint::payload_write, t.address, at, t.payload, &batch.given_up())) return error;
    }
    for (; at < t.length; at += kChunk) {
        const u32 size = std::min(kChunk, t.length - at), padded = whole_units(size);
        u8* room = bounce.room(padded);
        const int gone = touching(batch, [&] { std::memcpy(room, t.address + at, size); });
        if (gone) return gone;
        std::memset(room + size, 0, padded - size);
        if (const int error = file.write(FaultPoint::payload_write, room, padded, t.payload + at)) return error;
    }
    return 0;
}

// The ends of runs of things that stand side by side in a sorted list: calls each(first, last).
template <class List, class At, class Each>
int each_run(const List& list, At&& at, Each&& each) {
    for (std::size_t first = 0; first < list.size();) {
        std::size_t last = first + 1;
        while (last < list.size() && at(list[last]) == at(list[last - 1]) + kRecord) ++last;
        if (const int error = each(first, last)) return error;
        first = last;
    }
    return 0;
}

}  // namespace

void SlabDisk::degrade(const std::string& why) {
    const std::lock_guard guard(why_mutex_);
    if (is_degraded_.exchange(true)) return;
    why_ = folder_ + ": " + why + "; what is on this disk is a miss until the store is opened again";
}

std::string SlabDisk::why() const {
    const std::lock_guard guard(why_mutex_);
    return why_;
}

void SlabDisk::count_error(int error) {
    if (error == 0) return;
    const DiskErrorKind kind = error == ENOSPC      ? DiskErrorKind::no_space
                               : error == EROFS     ? DiskErrorKind::read_only
                               : error == ETIMEDOUT ? DiskErrorKind::timeout
                                                    : DiskErrorKind::io;
    errors_[static_cast<std::size_t>(kind)].fetch_add(1, std::memory_order_relaxed);
}

void SlabDisk::count_read_error(int error) {
    count_error(error);
    if (read_errors_.fetch_add(1) + 1 >= kReadErrorsMost)
        degrade(std::to_string(kReadErrorsMost) + " reads in a row failed: " + std::generic_category().message(error));
}

// What writes say: a full disk is the caller's to deal with, all else ends the disk's service.
int SlabDisk::settle(int error, const char* what) {
    count_error(error);
    if (error == ETIMEDOUT) hangs_ = true;
    if (error == ETIMEDOUT) degrade(std::string(what) + ": the disk does not answer");
    if (error != 0 && error != ENOSPC) degrade(std::string(what) + ": " + std::generic_category().message(error));
    return error;
}

int SlabDisk::on_pool(std::function<int()> work) {
    const auto error = std::make_shared<int>(0);
    const bool done = pool_.run(1, [error, work = std::move(work)](u32, IoBatch&, Bounce&) { *error = work(); });
    return done ? *error : ETIMEDOUT;
}

int SlabDisk::read(const Transfers& transfers) {
    if (is_degraded()) return EIO;
    const auto files = files_;
    const auto count = static_cast<u32>(transfers->size());
    u64 bytes = 0;
    for (const Transfer& t : *transfers) bytes += t.read_end() - t.read_begin();
    if (bytes <= std::max(kRingBatch, kRingValue * count))
        if (auto ring = take_ring()) return settle(read_by_ring(std::move(ring), *transfers) ? 0 : ETIMEDOUT, "reading values");
    const bool done = pool_.run(count, [files, transfers](u32 index, IoBatch& batch, Bounce& bounce) {
        Transfer& t = (*transfers)[index];
        t.error = read_one(files->extents, t, batch, bounce);
    });
    return settle(done ? 0 : ETIMEDOUT, "reading values");
}

// A ring that is this caller's alone until it gives it back, or nothing where there are none.
std::unique_ptr<ReadRing> SlabDisk::take_ring() {
    if (!has_rings()) return nullptr;
    {
        const std::lock_guard guard(rings_mutex_);
        if (!rings_.empty()) {
            auto ring = std::move(rings_.back());
            rings_.pop_back();
            return ring;
        }
    }
    auto ring = ReadRing::open();
    if (!ring) has_rings_ = false;
    return ring;
}

bool SlabDisk::read_by_ring(std::unique_ptr<ReadRing> ring, std::vector<Transfer>& transfers) {
    if (!ring->run(files_->extents, transfers, timeout_)) {
        static_cast<void>(ring.release());  // the kernel may still write to its memory
        return false;
    }
    const std::lock_guard guard(rings_mutex_);
    if (rings_.size() < kRingsKept) rings_.push_back(std::move(ring));
    return true;
}

int SlabDisk::write(const Transfers& transfers) {
    if (is_degraded()) return EIO;
    const auto files = files_;
    const auto count = static_cast<u32>(transfers->size());
    const bool done = pool_.run(count, [files, transfers](u32 index, IoBatch& batch, Bounce& bounce) {
        Transfer& t = (*transfers)[index];
        t.error = write_one(files->extents, t, batch, bounce);
    });
    if (!done) return settle(ETIMEDOUT, "writing values");
    for (const Transfer& t : *transfers) settle(t.error, "writing values");
    return is_degraded() ? EIO : 0;
}

int SlabDisk::write_records(std::vector<PlacedRecord> records) {
    if (is_degraded()) return EIO;
    std::sort(records.begin(), records.end(), [](const PlacedRecord& a, const PlacedRecord& b) { return a.at < b.at; });
    const int error = on_pool([files = files_, records = std::move(records)] {
        std::vector<u8> octets;
        return each_run(
            records, [](const PlacedRecord& r) { return r.at; },
            [&](std::size_t first, std::size_t last) {
                octets.clear();
                for (std::size_t i = first; i < last; ++i) octets.insert(octets.end(), records[i].record.begin(), records[i].record.end());
                return files->table.write(FaultPoint::record_write, octets.data(), octets.size(), records[first].at);
            });
    });
    return settle(error, "writing records");
}

int SlabDisk::clear(std::vector<u64> records) {
    if (is_degraded()) return EIO;
    if (records.empty()) return 0;
    std::sort(records.begin(), records.end());
    const int error = on_pool([files = files_, records = std::move(records)] {
        std::vector<u8> zeros;
        return each_run(
            records, [](u64 at) { return at; },
            [&](std::size_t first, std::size_t last) {
                zeros.assign((last - first) * kRecord, 0);
                const int error = files->table.write(FaultPoint::clear_write, zeros.data(), zeros.size(), records[first]);
                // A full filesystem has no block for zeros, and needs none: what is not there is zeros.
                return error == ENOSPC ? files->table.punch(FaultPoint::clear_punch, records[first], zeros.size()) : error;
            });
    });
    if (error) return settle(error, "clearing records");
    return sync_table(FaultPoint::clear_sync);
}

int SlabDisk::clear_part(u32 extent) {
    if (is_degraded()) return EIO;
    const u64 at = extent * geometry().part_bytes(), size = geometry().part_bytes();
    const int error = on_pool([files = files_, at, size] {
        const int error = files->table.punch(FaultPoint::clear_punch, at, size);
        if (error != EOPNOTSUPP) return error;
        const std::vector<u8> zeros(size);
        return files->table.write(FaultPoint::clear_punch, zeros.data(), zeros.size(), at);
    });
    if (error) return settle(error, "clearing an extent's records");
    return sync_table(FaultPoint::clear_sync);
}

int SlabDisk::sync_once(FaultPoint point) {
    if (is_degraded()) return EIO;
    const auto files = files_;
    const int error = on_pool([files, point] { return (point == FaultPoint::payload_sync ? files->extents : files->table).sync(point); });
    if (error == ETIMEDOUT) return settle(error, "syncing");
    count_error(error);
    if (error) degrade("a sync failed: " + std::generic_category().message(error));  // what was lost is not known
    return error;
}

int SlabDisk::GroupSync::run(SlabDisk& disk, FaultPoint point) {
    std::unique_lock lock(mutex_);
    const u64 needed = begun_count_ + 1;  // one that begins after this call
    while (ended_count_ < needed) {
        if (begun_count_ > ended_count_) {
            ended_.wait(lock);  // the one that runs ends, for the pool's waits do
            continue;
        }
        ++begun_count_;
        lock.unlock();
        disk.sync_once(point);
        lock.lock();
        ended_count_ = begun_count_;
        ended_.notify_all();
    }
    return disk.is_degraded() ? EIO : 0;
}

}  // namespace kbtp::store
