// The Python face of the software RNIC: as thin as it can be. Arrays cross as plain buffers (fabric/api.py gives their dtypes), and
// nothing that moves data or waits holds the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdio>
#include <limits>
#include <string_view>

#include "crc32c.hpp"
#include "device.hpp"
#include "module.hpp"
#include "python_arrays.hpp"

namespace nb = nanobind;
using namespace kbtp;

namespace {

nb::bytes to_bytes(const std::vector<u8>& v) { return nb::bytes(v.data(), v.size()); }
std::vector<u8> from_bytes(const nb::bytes& b) {
    const auto* p = static_cast<const u8*>(b.data());
    return {p, p + b.size()};
}

template <class Record, class Post>
int post(nb::handle array, Post&& run) {
    const Buffer buffer(array, false);
    const auto records = buffer.as<const Record>();
    nb::gil_scoped_release nogil;
    return static_cast<int>(run(records));
}

QueueLimits make_limits(u32 send_depth, u32 receive_depth, u16 ird, u16 ord, double startup_timeout_s) {
    return {send_depth, receive_depth, ird, ord, startup_timeout_s};
}

void name_counters(nb::dict& d, const QueuePairStats& s) {
    for (const NamedCounter& c : kCounters) d[c.name] = u64{s.*c.counter};
}

// terminates_sent_0_1_02: layer, type, and the code in hexadecimal, as the RFCs write it.
void name_terminates(nb::dict& d, const char* direction, const std::map<u64, u64>& counts) {
    for (const auto& [code, count] : counts) {
        char name[64];
        std::snprintf(name, sizeof name, "terminates_%s_%u_%u_%02x", direction, static_cast<unsigned>(code >> 12 & 15),
                      static_cast<unsigned>(code >> 8 & 15), static_cast<unsigned>(code & 255));
        d[name] = count;
    }
}

nb::dict stats_dict(const QueuePairStats& s) {
    nb::dict d;
    name_counters(d, s);
    if (s.terminate_sent) name_terminates(d, "sent", {{s.terminate_sent, 1}});
    if (s.terminate_received) name_terminates(d, "received", {{s.terminate_received, 1}});
    d["peer_ird"] = u64{s.peer_ird};
    d["peer_ord"] = u64{s.peer_ord};
    d["stores_under_way"] = u64{s.stores_under_way};
    return d;
}

nb::dict stats_dict(const DeviceStats& s) {
    nb::dict d;
    name_counters(d, s.sum);
    name_terminates(d, "sent", s.terminates_sent);
    name_terminates(d, "received", s.terminates_received);
    d["queue_pairs"] = s.queue_pairs;
    d["queue_pairs_ended"] = s.queue_pairs_ended;
    const CaptureStats capture = s.capture.value_or(CaptureStats{});
    d["capture_packets"] = capture.packets;
    d["capture_bytes"] = capture.bytes;
    d["capture_dropped_packets"] = capture.dropped_packets;
    d["capture_errors"] = capture.errors;
    return d;
}

void bind_regions(nb::module_& m) {
    nb::class_<Region>(m, "Region")
        .def_prop_ro("stag", &Region::stag)
        .def_prop_ro("length", &Region::length)
        .def_prop_ro("is_valid", &Region::is_valid);

    nb::class_<CompletionQueue>(m, "CompletionQueue")
        .def(nb::init<>())
        .def("poll",  // as octets: an array over them is made faster than a copy of records
             [](CompletionQueue& q, std::size_t limit) {
                 const std::vector<Completion> out = q.poll(limit);
                 return nb::bytes(out.data(), out.size() * sizeof(Completion));
             })
        .def("poll_loads", &CompletionQueue::poll_loads)
        .def_prop_ro("is_empty", &CompletionQueue::is_empty)
        .def("wait", &CompletionQueue::wait, nb::call_guard<nb::gil_scoped_release>())
        .def("wake", &CompletionQueue::wake)
        .def("fileno", &CompletionQueue::fd);
}

// `pool` is a fabric.api.PoolState.
PoolState pool_state(nb::handle pool, u64 entries, u32 block_bytes) {
    PoolState s{};
    const Buffer memory(pool.attr("memory"), true);
    s.memory = memory.data();
    s.blocks = memory.size() / block_bytes;
    s.base_offset = nb::cast<u64>(pool.attr("base_offset"));
    s.block_states = array_of<u8>(pool.attr("block_states"), s.blocks, "block states");
    s.entry_states = array_of<u8>(pool.attr("entry_states"), entries, "entry states");
    s.owners = array_of<u64>(pool.attr("owners"), entries, "owners");
    s.generations = array_of<u16>(pool.attr("generations"), entries, "generations");
    s.log2_slots = nb::cast<u32>(pool.attr("log2_slots"));
    s.slots = array_of<u32>(pool.attr("slots"), std::size_t{4} << s.log2_slots, "slots");
    s.counters = array_of<u64>(pool.attr("counters"), 2, "counters");
    s.masked = nb::cast<bool>(pool.attr("is_masked"));
    s.clears = nb::cast<bool>(pool.attr("clears_blocks"));
    return s;
}

std::shared_ptr<Executor> create_executor(nb::handle table, u64 base_handle, u32 block_bytes, nb::handle pool) {
    const Buffer buffer(table, !pool.is_none());
    if (buffer.size() % 16 != 0 || reinterpret_cast<std::uintptr_t>(buffer.data()) % 8 != 0)
        throw std::invalid_argument("a block table is an 8-aligned array of 16-octet entries");
    const u64 entries = buffer.size() / 16;
    std::optional<PoolState> state;
    if (!pool.is_none()) state = pool_state(pool, entries, block_bytes);
    return std::make_shared<Executor>(buffer.data(), entries, base_handle, block_bytes, state);
}

void bind_executor(nb::module_& m) {
    nb::class_<Executor>(m, "Executor")
        .def("readers_into",
             [](Executor& e, nb::handle entries, nb::handle counts) {
                 const Buffer in(entries, false), out(counts, true);
                 const auto which = in.as<const u64>();
                 const auto into = out.as<u32>();
                 if (which.size() != into.size()) throw std::invalid_argument("as many counts as entries");
                 std::atomic_thread_fence(std::memory_order_seq_cst);  // after the caller cleared the entries
                 for (std::size_t i = 0; i < which.size(); ++i) into[i] = e.readers(which[i]);
             })
        .def("hold",
             [](Executor& e, nb::handle entries) {
                 const Buffer in(entries, false);
                 for (const u64 index : in.as<const u64>()) e.hold(index);
             })
        .def("let_go",
             [](Executor& e, nb::handle entries) {
                 const Buffer in(entries, false);
                 for (const u64 index : in.as<const u64>()) e.end_read(index);
             })
        .def("allocate", &Executor::allocate)
        .def("give_back", &Executor::give_back)
        .def(
            "allocate_into",
            [](Executor& e, nb::handle offsets) {
                const Buffer buffer(offsets, true);
                std::size_t count = 0;
                for (u64& offset : buffer.as<u64>()) {
                    const auto found = e.allocate();
                    if (!found) break;
                    offset = *found;
                    ++count;
                }
                return count;
            },
            "As many blocks as there are and as fit into `offsets`; returns how many.")
        .def("give_back_all",
             [](Executor& e, nb::handle offsets) {
                 const Buffer buffer(offsets, false);
                 for (const u64 offset : buffer.as<const u64>()) e.give_back(offset);
             })
        .def("stop", &Executor::stop);

    nb::class_<Work>(m, "Work")
        .def_prop_ro("kind", [](const Work& w) { return static_cast<int>(w.kind); })
        .def_ro("opcode", &Work::opcode)
        .def_ro("entry", &Work::entry)
        .def_ro("block_offset", &Work::block_offset)
        .def_ro("length", &Work::length)
        .def_ro("stag", &Work::stag)
        .def_ro("offset", &Work::offset)
        .def_ro("invalidate", &Work::invalidate)
        .def_ro("snapshot", &Work::snapshot)
        .def_prop_ro("answer", [](const Work& w) {
            return w.octets ? nb::bytes(w.octets->data(), w.octets->size()) : nb::bytes(w.answer.data(), w.answer.size());
        });

    nb::class_<ExecutorSession>(m, "ExecutorSession")
        .def("take", [](ExecutorSession& s, const nb::bytes& message, bool is_up,
                        bool may_read) { return s.take({static_cast<const u8*>(message.data()), message.size()}, is_up, may_read); })
        .def("store_asked", &ExecutorSession::store_asked)
        .def("load_sent", &ExecutorSession::load_sent)
        .def("store_arrived", &ExecutorSession::store_arrived)
        .def("unpark", &ExecutorSession::unpark)
        .def("give_up", &ExecutorSession::give_up)
        .def_prop_ro("has_unsettled", &ExecutorSession::has_unsettled);

    m.def("create_executor", &create_executor, nb::arg("table"), nb::arg("base_handle"), nb::arg("block_bytes"), nb::arg("pool").none());
    m.def(
        "create_executor_session",
        [](std::shared_ptr<Executor> executor, nb::handle grant, u64 pool_bytes) {
            return std::make_shared<ExecutorSession>(std::move(executor), store_grant(grant), pool_bytes);
        },
        nb::arg("executor"), nb::arg("grant").none(), nb::arg("pool_bytes"));
}

// Posts a batch of LOADs; the batch, or None if the pair has ended. Throws TypeError for values that have to be converted first.
nb::object post_loads(QueuePair& q, u32 sequence, nb::handle handles, nb::handle generations, u32 stag, nb::handle offsets,
                      nb::handle lengths, u16 flags) {
    auto batch = load_batch(sequence, handles, generations, stag, offsets, lengths, flags);
    auto posted = QueuePair::Posted::ok;
    {
        nb::gil_scoped_release nogil;
        posted = q.post_batch(batch);
    }
    return posted == QueuePair::Posted::ok ? nb::cast(batch) : nb::none();
}

void bind_queue_pair(nb::module_& m) {
    nb::class_<RequestBatch>(m, "RequestBatch")
        .def_prop_ro("count", &RequestBatch::count)
        .def_prop_ro("failed_count", &RequestBatch::failed);
    nb::class_<LoadBatch, RequestBatch>(m, "LoadBatch");

    nb::class_<QueuePair>(m, "QueuePair")
        .def_prop_ro("number", &QueuePair::number)
        .def_prop_ro("peer", &QueuePair::peer)
        .def_prop_ro("peer_private_data", [](const QueuePair& q) { return to_bytes(q.peer_private_data()); })
        .def("connect",
             [](QueuePair& q, const std::string& host, u16 port, const nb::bytes& data) {
                 auto private_data = from_bytes(data);
                 nb::gil_scoped_release nogil;
                 q.connect(host, port, std::move(private_data));
             })
        .def("accept", [](QueuePair& q, const nb::bytes& data) { q.accept(from_bytes(data)); })
        .def("post_send", [](QueuePair& q, nb::handle a) { return post<WorkRequest>(a, [&](auto r) { return q.post_send(r); }); })
        .def("post_receive", [](QueuePair& q, nb::handle a) { return post<ReceiveRequest>(a, [&](auto r) { return q.post_receive(r); }); })
        .def(
            "attach_executor",
            [](QueuePair& q, std::shared_ptr<Executor> executor, const RegionPtr& pool, nb::handle grant) {
                q.attach_executor(std::move(executor), pool, store_grant(grant));
            },
            nb::arg("executor"), nb::arg("pool"), nb::arg("grant").none())
        .def("reading", &QueuePair::reading)
        .def("enable_loads", &QueuePair::enable_loads)
        .def("post_loads", &post_loads)
        .def("abandon_batch", &QueuePair::abandon_batch, nb::call_guard<nb::gil_scoped_release>())
        .def("load_results",
             [](QueuePair& q, const LoadBatch& batch) {
                 const auto results = q.read_batch([&] { return batch.results(); });
                 return nb::bytes(results.data(), results.size() * sizeof(LoadResult));
             })
        .def("unsent_loads", &QueuePair::unsent_loads)
        .def("close", &QueuePair::close)
        .def("abort", &QueuePair::abort)
        .def("end", &QueuePair::end_now, nb::call_guard<nb::gil_scoped_release>())
        .def("stats", [](QueuePair& q) { return stats_dict(q.stats()); });

    nb::class_<PendingConnection>(m, "ConnectionRequest")
        .def_prop_ro("peer", &PendingConnection::peer)
        .def_prop_ro("private_data", [](const PendingConnection& p) { return to_bytes(p.private_data()); })
        .def("create_qp",
             [](PendingConnection& p, u32 pd, std::shared_ptr<CompletionQueue> cq, u32 send_depth, u32 receive_depth, u16 ird, u16 ord,
                double timeout) { return p.create_qp(pd, std::move(cq), make_limits(send_depth, receive_depth, ird, ord, timeout)); })
        .def("reject", [](PendingConnection& p, const nb::bytes& data) { p.reject(from_bytes(data)); });

    nb::class_<Listener>(m, "Listener")
        .def_prop_ro("host", &Listener::host)
        .def_prop_ro("port", &Listener::port)
        .def("poll", &Listener::poll)
        .def("close", &Listener::close);
}

// A network's address as 16 octets, IPv4 as IPv6 has it, the length of its prefix, and a congestion control.
using NetworkRule = std::tuple<nb::bytes, u32, std::string>;

std::shared_ptr<Device> open_device(u32 mulpdu, u32 first_atomic_id, const std::vector<u32>& stags, bool crc, bool peer_to_peer,
                                    double spin_s, u32 progress_threads, u32 keepalive_s, const std::string& congestion_local,
                                    const std::string& congestion_remote, const std::vector<NetworkRule>& congestion_peers,
                                    const std::optional<std::string>& capture_path, u64 capture_limit_bytes, bool capture_checksums) {
    DeviceOptions options;
    options.mulpdu = mulpdu;
    options.first_atomic_id = first_atomic_id;
    options.fixed_stags = {stags.begin(), stags.end()};
    options.crc = crc;
    options.peer_to_peer = peer_to_peer;
    options.spin = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(spin_s));
    options.progress_threads = progress_threads;
    options.tcp = {keepalive_s, congestion_local, congestion_remote, {}};
    for (const auto& [network, prefix_bits, name] : congestion_peers) {
        CongestionRule rule{{}, prefix_bits, name};
        if (network.size() != rule.network.size() || prefix_bits > 128) throw std::invalid_argument("a network is 16 octets and a prefix");
        std::memcpy(rule.network.data(), network.data(), rule.network.size());
        options.tcp.congestion_peers.push_back(std::move(rule));
    }
    if (capture_path) options.capture = CaptureOptions{*capture_path, capture_limit_bytes, capture_checksums};
    auto device = std::make_shared<Device>(std::move(options));
    device->start();
    return device;
}

void bind_device(nb::module_& m) {
    nb::class_<Device>(m, "Device")
        .def("alloc_pd", &Device::new_pd)
        .def("register",
             [](Device& d, u32 pd, u8 rights, nb::handle memory) {
                 const bool writes = rights & (access::local_write | access::remote_write | access::remote_atomic);
                 const Buffer buffer(memory, writes);  // the caller keeps the object, and so the memory, alive
                 if (buffer.size() == 0) throw std::invalid_argument("an empty buffer can't be registered");
                 return d.regions().add(pd, rights, {buffer.data()}, buffer.size(), buffer.size());
             })
        .def("register_pages",
             [](Device& d, u32 pd, u8 rights, nb::handle addresses, u64 page_bytes) {
                 const Buffer buffer(addresses, false);
                 const auto list = buffer.as<const u64>();
                 if (list.empty() || page_bytes == 0) throw std::invalid_argument("no pages to register");
                 std::vector<u8*> pages;
                 pages.reserve(list.size());
                 for (u64 a : list) pages.push_back(reinterpret_cast<u8*>(a));
                 const u64 length = page_bytes * list.size();
                 return d.regions().add(pd, rights, std::move(pages), page_bytes, length);
             })
        .def(
            "invalidate", [](Device& d, const RegionPtr& r) { d.regions().remove(r); }, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "close_pd", [](Device& d, u32 pd) { d.regions().remove_domain(pd); }, nb::call_guard<nb::gil_scoped_release>())
        .def("create_qp",
             [](Device& d, u32 pd, std::shared_ptr<CompletionQueue> cq, u32 send_depth, u32 receive_depth, u16 ird, u16 ord,
                double timeout) { return d.create_qp(pd, std::move(cq), make_limits(send_depth, receive_depth, ird, ord, timeout)); })
        .def("listen", &Device::listen, nb::call_guard<nb::gil_scoped_release>())
        .def("stats",
             [](Device& d) {
                 DeviceStats stats;
                 {
                     nb::gil_scoped_release nogil;
                     stats = d.stats();
                 }
                 return stats_dict(stats);
             })
        .def("close", &Device::close, nb::call_guard<nb::gil_scoped_release>());
    m.def("open_device", &open_device, nb::arg("mulpdu"), nb::arg("first_atomic_id"), nb::arg("stags"), nb::arg("crc"),
          nb::arg("peer_to_peer"), nb::arg("spin_s"), nb::arg("progress_threads"), nb::arg("keepalive_s"), nb::arg("congestion_local"),
          nb::arg("congestion_remote"), nb::arg("congestion_peers"), nb::arg("capture_path").none(), nb::arg("capture_limit_bytes"),
          nb::arg("capture_checksums"), "Open a device and start its progress threads.");
}

}  // namespace

const Crc32c& crc_form(const std::string& name) {
    for (const Crc32c& form : crc32c_implementations())
        if (form.name == name) return form;
    throw std::invalid_argument("this CPU has no CRC-32C form called " + name);
}

void bind_crc(nb::module_& m) {
    m.def(
        "crc32c", [](const nb::bytes& data, u32 crc) { return crc32c_extend(crc, data.data(), data.size()); }, nb::arg("data"),
        nb::arg("crc") = 0);
    m.def(
        "crc32c_portable", [](const nb::bytes& data, u32 crc) { return crc32c_portable(crc, data.data(), data.size()); }, nb::arg("data"),
        nb::arg("crc") = 0);
    m.def(
        "crc32c_of",
        [](const std::string& name, nb::handle data, u32 crc, bool is_cold) {
            const Buffer buffer(data, false);
            const Crc32c& form = crc_form(name);
            return is_cold ? form.extend_cold(crc, buffer.data(), buffer.size(), buffer.data())
                           : form.extend(crc, buffer.data(), buffer.size());
        },
        nb::arg("name"), nb::arg("data"), nb::arg("crc") = 0, nb::arg("is_cold") = false, "By one of `crc32c_implementations`.");
    m.def(
        "crc32c_copy",
        [](const std::string& name, nb::handle to, nb::handle from, u32 crc) {
            const Buffer target(to, true), source(from, false);
            if (target.size() != source.size()) throw std::invalid_argument("as many octets to as from");
            const u32 copied = crc_form(name).copy(crc, target.data(), source.data(), source.size());
            crc32c_copy_fence();
            return copied;
        },
        nb::arg("name"), nb::arg("to"), nb::arg("from"), nb::arg("crc") = 0);
    m.def(
        "crc32c_implementations",
        [] {
            std::vector<std::string> names;
            for (const Crc32c& form : crc32c_implementations()) names.emplace_back(form.name);
            return names;
        },
        "Those that this CPU can run, the one in use first.");
}

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a device that lives until the process ends is no leak
    bind_regions(m);
    bind_executor(m);
    bind_keyed(m);
    bind_queue_pair(m);
    bind_messages(m);
    bind_device(m);
    bind_slab(m);
    bind_crc(m);
    bind_client(m);
    bind_calls(m);
    bind_identity(m);
}
