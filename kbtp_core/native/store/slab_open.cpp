// Opening a slab: what is in its folder, whether it is ours, and making what is not there.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <random>
#include <system_error>

#include "slab_disk.hpp"
#include "store_error.hpp"

namespace kbtp::store {
namespace {

namespace fs = std::filesystem;

std::string say(int error) { return std::generic_category().message(error); }

const char* way_out(int error) {
    if (error == EROFS || error == EACCES || error == EPERM) return ": a store needs a folder that it may write";
    return error == ENOSPC ? ": give the store less capacity" : "";
}

[[noreturn]] void fail(const std::string& path, int error) { throw StoreError(path + ": " + say(error) + way_out(error)); }

Geometry geometry_of(const SlabOptions& options) {
    if (options.extent_bytes < kUnit || options.extent_bytes % kUnit != 0 || options.extent_bytes > u64{1} << 31)
        throw StoreError("an extent has a multiple of 4096 octets up to 2 GiB, not " + std::to_string(options.extent_bytes));
    const Geometry geometry{options.extent_bytes, options.capacity_bytes / options.extent_bytes};
    if (geometry.extent_count == 0 || geometry.extent_count >= kNone)
        throw StoreError("a capacity of " + std::to_string(options.capacity_bytes) + " octets is no number of extents of " +
                         std::to_string(options.extent_bytes));
    return geometry;
}

std::chrono::milliseconds milliseconds_of(double seconds) { return std::chrono::milliseconds(static_cast<long long>(seconds * 1000)); }

StoreId new_id() {
    StoreId id;
    std::random_device device;
    for (u8& octet : id) octet = static_cast<u8>(device());
    return id;
}

}  // namespace

SlabDisk::SlabDisk(const SlabOptions& options)
    : folder_(options.folder),
      faults_(std::make_shared<Faults>(options.faults)),
      pool_(options.io_threads, milliseconds_of(options.io_timeout_s)),
      timeout_(milliseconds_of(options.io_timeout_s)),
      has_rings_(options.io_uring) {
    const Geometry wanted = geometry_of(options);
    try {
        fs::create_directories(folder_);
        lock_folder();
        find_superblock(wanted);
        open_files(options.direct);
        if (auto ring = take_ring()) rings_.push_back(std::move(ring));
    } catch (const fs::filesystem_error& error) {
        fail(error.path1().string(), error.code().value());
    } catch (const std::system_error& error) {
        throw StoreError(error.what() + std::string(way_out(error.code().value())));
    }
}

SlabDisk::~SlabDisk() = default;

void SlabDisk::lock_folder() {
    lock_ = std::make_shared<DiskFile>(path("lock"), O_RDWR | O_CREAT, faults_);
    if (::flock(lock_->fd(), LOCK_EX | LOCK_NB) != 0)
        throw StoreError(folder_ + " is open in another process or store: give each store a folder of its own");
}

void SlabDisk::find_superblock(const Geometry& wanted) {
    const std::string name = path("superblock");
    if (fs::exists(name)) {
        const DiskFile file(name, O_RDONLY, faults_);
        std::array<u8, kSuperblock> octets{};
        if (file.size() != octets.size())
            throw StoreError(name + " has " + std::to_string(file.size()) + " octets, not 4096: it is left as it is");
        if (const int error = file.read(FaultPoint::table_read, octets.data(), octets.size(), 0)) fail(name, error);
        block_ = read_superblock(octets, name);
        if (block_.geometry == wanted) return;
        const Geometry& has = block_.geometry;
        throw StoreError(folder_ + " holds a store of " + std::to_string(has.extent_count) + " extents of " +
                         std::to_string(has.extent_bytes) + " octets (capacity " + std::to_string(has.extent_count * has.extent_bytes) +
                         "), and was opened as one of " + std::to_string(wanted.extent_count) + " of " +
                         std::to_string(wanted.extent_bytes) + ": open it as it is, or use another folder");
    }
    // None yet, or making it was cut short: then its table is all zeros, for the superblock comes first.
    if (fs::exists(path("slots.tbl")) && DiskFile(path("slots.tbl"), O_RDONLY, faults_).next_data(0) != ~u64{0})
        throw StoreError(folder_ + " holds slots.tbl but no superblock: it is left as it is; use another folder");
    make_files(wanted);
    block_ = {wanted, new_id(), 0, 1, true};
    if (const int error = write_superblock_file(block_)) fail(name, error);
}

void SlabDisk::make_files(const Geometry& geometry) {
    const DiskFile extents(path("extents.dat"), O_RDWR | O_CREAT, faults_), table(path("slots.tbl"), O_RDWR | O_CREAT | O_TRUNC, faults_);
    int error = extents.allocate(FaultPoint::extents_allocate, geometry.extent_bytes * geometry.extent_count);
    if (error == EOPNOTSUPP) error = extents.resize(geometry.extent_bytes * geometry.extent_count), is_allocated_ = false;
    if (error == 0) error = table.resize(geometry.table_bytes());
    if (error == 0) error = extents.sync(FaultPoint::payload_sync);
    if (error == 0) error = table.sync(FaultPoint::record_sync);
    if (error == 0) return;
    ::unlink(path("extents.dat").c_str());
    ::unlink(path("slots.tbl").c_str());
    fail(folder_, error);
}

void SlabDisk::open_files(bool direct) {
    const std::string name = path("extents.dat");
    int flags = O_RDWR;
    if (direct) {
        const int fd = ::open(name.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
        if (fd >= 0) ::close(fd);
        if (fd < 0 && errno != EINVAL) fail(name, errno);
        if (fd >= 0) flags |= O_DIRECT;
    }
    is_direct_ = flags & O_DIRECT;
    files_ = std::shared_ptr<Files>(new Files{{name, flags, faults_}, {path("slots.tbl"), O_RDWR, faults_}, lock_});
    const Geometry& g = block_.geometry;
    const auto expect = [&](const DiskFile& file, const char* file_name, u64 size) {
        if (file.size() != size)
            throw StoreError(path(file_name) + " has " + std::to_string(file.size()) + " octets and its superblock says " +
                             std::to_string(size) + ": it is left as it is; use another folder");
    };
    expect(files_->extents, "extents.dat", g.extent_bytes * g.extent_count);
    expect(files_->table, "slots.tbl", g.table_bytes());
}

int SlabDisk::write_superblock_file(const Superblock& block) {
    const std::string temporary = path("superblock.new"), name = path("superblock");
    const auto octets = write_superblock(block);
    {
        const DiskFile file(temporary, O_RDWR | O_CREAT | O_TRUNC, faults_);
        if (const int error = file.write(FaultPoint::superblock_write, octets.data(), octets.size(), 0)) return error;
        if (const int error = file.sync(FaultPoint::superblock_sync)) return error;
    }
    const Fault fault = faults_->visit(FaultPoint::superblock_rename);
    if (fault.action == FaultAction::io_error) return EIO;
    if (::rename(temporary.c_str(), name.c_str()) != 0) return errno;
    if (fault.action == FaultAction::kill_after) Faults::die();
    return DiskFile(folder_, O_RDONLY | O_DIRECTORY, faults_).sync(FaultPoint::folder_sync);
}

void SlabDisk::scan(const std::function<void(u64 at, const u8* octets, std::size_t size)>& run) {
    constexpr u64 kStride = u64{4} << 20;
    Bounce bounce;
    const u64 size = geometry().table_bytes();
    for (u64 at = 0; at < size;) {
        const u64 data = files_->table.next_data(at);
        if (data >= size) break;
        at = data / kUnit * kUnit;  // whole records
        const u64 hole = std::min(size, (files_->table.next_hole(data) + kUnit - 1) / kUnit * kUnit);
        for (; at < hole; at += std::min(kStride, hole - at)) {
            const u64 length = std::min(kStride, hole - at);
            u8* octets = bounce.room(kStride);
            if (const int error = files_->table.read(FaultPoint::table_read, octets, length, at)) fail(path("slots.tbl"), error);
            run(at, octets, length);
        }
    }
}

void SlabDisk::begin_epoch() {
    Superblock next = block_;
    ++next.epoch;
    next.is_clean = false;
    if (const int error = write_superblock_file(next)) fail(path("superblock"), error);
}

int SlabDisk::end_epoch(u64 next_sequence) {
    Superblock last = block_;
    ++last.epoch;
    last.is_clean = true;
    last.sequence = next_sequence;
    int error = EIO;
    try {
        if (!is_degraded()) error = write_superblock_file(last);
    } catch (const std::system_error& failed) {
        error = failed.code().value();
    }
    // Somebody else may have the folder now, unless a thread may still write to it: then the end of that thread lets go.
    if (!hangs_.load()) ::flock(lock_->fd(), LOCK_UN);
    return error;
}

}  // namespace kbtp::store
