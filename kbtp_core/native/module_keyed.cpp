// The Python face of the keyed store: as thin as it can be. Arrays cross as plain buffers (store/ram.py gives their dtypes), and no
// call holds the GIL while it works.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "module.hpp"
#include "python_arrays.hpp"
#include "store/slab.hpp"

namespace nb = nanobind;

namespace kbtp {
namespace {

std::shared_ptr<KeyedStore> create_keyed_store(std::shared_ptr<Executor> executor, u64 base_entry, u64 capacity, u64 owner, u64 dirty_limit,
                                               bool writes_around, bool acks_on_disk, u32 default_lease_ms, u32 longest_lease_ms) {
    const KeyedOptions options{base_entry, capacity, owner, dirty_limit, writes_around, acks_on_disk, default_lease_ms, longest_lease_ms};
    return std::make_shared<KeyedStore>(std::move(executor), options);
}

u64 lookup(KeyedStore& store, u64 tenant, nb::handle ids, u32 flags, nb::handle out) {
    const Buffer in(ids, false), results(out, true);
    const auto items = results.as<LookupItem>();
    if (in.size() != 16 * items.size()) throw std::invalid_argument("as many results as ids of 16 octets");
    nb::gil_scoped_release nogil;
    return store.lookup(tenant, in.as<const u8>(), flags, items.data());
}

u64 publish(KeyedStore& store, nb::handle grant, u64 tenant, u32 flags, nb::handle items, nb::handle out) {
    const Buffer in(items, false), results(out, true);
    const auto which = in.as<const PublishItem>();
    const auto into = results.as<PublishResult>();
    if (which.size() != into.size()) throw std::invalid_argument("as many results as items");
    const auto native = store_grant(grant);
    if (!native || !native->keyed) throw std::invalid_argument("a grant without STORE publishes nothing");
    nb::gil_scoped_release nogil;
    return store.publish(*native, native->keyed->space, tenant, flags, which, into.data());
}

u64 remove(KeyedStore& store, u64 tenant, nb::handle ids, bool fence, nb::handle was_there) {
    const Buffer in(ids, false), out(was_there, true);
    if (in.size() != 16 * out.size()) throw std::invalid_argument("as many answers as ids of 16 octets");
    nb::gil_scoped_release nogil;
    return store.remove(tenant, in.as<const u8>(), fence, out.data());
}

void pin(const KeyedSession& session, nb::handle handles, nb::handle generations, bool wanted, u32 lease_ms, nb::handle statuses) {
    const Buffer h(handles, false), g(generations, false), s(statuses, true);
    const auto which = h.as<const u64>();
    const auto seen = g.as<const u16>();
    const auto out = s.as<u16>();
    if (which.size() != seen.size() || which.size() != out.size())
        throw std::invalid_argument("as many statuses as handles and generations");
    const std::vector<u64>* tenants = session.tenants ? &*session.tenants : nullptr;
    for (std::size_t i = 0; i < which.size(); ++i) out[i] = session.store->pin(which[i], seen[i], wanted, lease_ms, tenants);
}

// Runs `call` over the DiskItems in the buffer, without the GIL.
template <class Call>
auto with_items(nb::handle items, Call&& call) {
    const Buffer buffer(items, true);
    const auto span = buffer.as<DiskItem>();
    nb::gil_scoped_release nogil;
    return call(span);
}

nb::bytes settled_bytes(const std::vector<Settled>& settled) { return nb::bytes(settled.data(), settled.size() * sizeof(Settled)); }

nb::dict stats(const KeyedStore& store) {
    const KeyedCounters counters = store.counters();
    const KeyedLevels levels = store.levels();
    nb::dict d;
    for (const NamedKeyedCounter& c : kKeyedCounters) d[c.name] = u64{counters.*c.counter};
    for (const NamedKeyedLevel& l : kKeyedLevels) d[l.name] = u64{levels.*l.level};
    return d;
}

// What slab engines have: the values of a store are on one of them each.
class SlabIndex : public BackingIndex {
  public:
    explicit SlabIndex(std::vector<std::shared_ptr<store::Slab>> slabs) : slabs_(std::move(slabs)) {}
    u32 length_of(const ValueKey& key) override {
        std::array<u8, 24> octets;
        store_be<u64>(octets.data(), key.tenant);
        std::copy(key.id.begin(), key.id.end(), octets.begin() + 8);
        u32 length = 0;
        for (const auto& slab : slabs_) {
            slab->lookup(octets.data(), {&length, 1});
            if (length) break;
        }
        return length;
    }

  private:
    const std::vector<std::shared_ptr<store::Slab>> slabs_;
};

void bind_store(nb::module_& m) {
    nb::class_<KeyedStore>(m, "KeyedStore")
        .def("set_limit", &KeyedStore::set_limit, nb::call_guard<nb::gil_scoped_release>())
        .def("ask_slabs",
             [](KeyedStore& store, std::vector<std::shared_ptr<store::Slab>> slabs) {
                 store.set_backing(std::make_shared<SlabIndex>(std::move(slabs)));
             })
        .def("set_lanes", &KeyedStore::set_lanes)
        .def("set_limit_of_tenant", &KeyedStore::set_limit_of_tenant)
        .def("set_default_limit", &KeyedStore::set_default_limit)
        .def("set_now", &KeyedStore::set_now)
        .def("now_ms", &KeyedStore::now_ms)
        .def("lookup", &lookup)
        .def("note_lookup",
             [](KeyedStore& store, nb::handle found) {
                 const Buffer items(found, false);
                 store.note_lookup(items.as<const LookupItem>());
             })
        .def("publish", &publish)
        .def("remove", &remove)
        .def("unfence",
             [](KeyedStore& store, u64 tenant, nb::handle ids) {
                 const Buffer in(ids, false);
                 store.unfence(tenant, in.as<const u8>());
             })
        .def("tenant_of", &KeyedStore::tenant_of)
        .def(
            "remove_space",
            [](KeyedStore& store, u64 tenant, u64 space, u64 cursor, std::optional<u64> lane) {
                u64 removed = 0;
                const u64 next = store.remove_space(tenant, space, cursor, lane.value_or(kAllLanes), removed);
                return std::pair(next, removed);
            },
            nb::arg("tenant"), nb::arg("space"), nb::arg("cursor"), nb::arg("lane").none() = nb::none(),
            nb::call_guard<nb::gil_scoped_release>())
        .def("list",
             [](KeyedStore& store, u64 tenant, u64 space, u64 cursor, nb::handle out) {
                 const Buffer buffer(out, true);
                 u64 count = 0;
                 const u64 next = store.list(tenant, space, cursor, buffer.as<ListItem>(), count);
                 return std::pair(next, count);
             })
        .def("will_have", &KeyedStore::will_have)
        .def("tick", &KeyedStore::tick, nb::call_guard<nb::gil_scoped_release>())
        .def("take_dirty", [](KeyedStore& store, u64 lane, nb::handle out,
                              double wait_s) { return with_items(out, [&](auto items) { return store.take_dirty(lane, items, wait_s); }); })
        .def("flushed", [](KeyedStore& store, nb::handle items) { with_items(items, [&](auto span) { store.flushed(span); }); })
        .def("reserve", [](KeyedStore& store, nb::handle items) { with_items(items, [&](auto span) { store.reserve(span); }); })
        .def("promoted", [](KeyedStore& store, nb::handle items) { with_items(items, [&](auto span) { store.promoted(span); }); })
        .def("list_read",
             [](const KeyedStore& store, u64 lane, u64 cursor, nb::handle out) {
                 u64 count = 0;
                 const u64 next = with_items(out, [&](auto items) { return store.list_read(lane, cursor, items, count); });
                 return std::pair(next, count);
             })
        .def("drop_read", [](KeyedStore& store, nb::handle items) { with_items(items, [&](auto span) { store.drop_read(span); }); })
        .def("wake_flushers", &KeyedStore::wake_flushers)
        .def("take_settled", [](KeyedStore& store) { return settled_bytes(store.take_settled()); })
        .def("kept_counts",
             [](const KeyedStore& store) {
                 const KeyedLevels levels = store.levels();
                 return std::pair(levels.leaving, levels.promoting);
             })
        .def_prop_ro("promoting_count", &KeyedStore::promoting_count)
        .def("stats", &stats)
        .def("bytes_of_tenant", &KeyedStore::bytes_of_tenant)
        .def("bytes_of_tenants", &KeyedStore::bytes_of_tenants)
        .def("set_siblings", &KeyedStore::set_siblings)
        .def_prop_ro("memory_bytes", &KeyedStore::memory_bytes)
        .def("check_integrity", &KeyedStore::check_integrity, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_keyed(nb::module_& m) {
    bind_store(m);
    nb::class_<KeyedSession>(m, "KeyedSession")
        .def(
            "__init__",
            [](KeyedSession* self, std::shared_ptr<KeyedStore> store, std::optional<std::vector<u64>> tenants) {
                if (tenants) std::sort(tenants->begin(), tenants->end());
                new (self) KeyedSession{std::move(store), std::move(tenants)};
            },
            nb::arg("store"), nb::arg("tenants").none() = nb::none())
        .def("pin", &pin)
        .def("set_space", [](KeyedSession& session, u64 tenant, u64 id, u32 ttl_s) { session.space = {tenant, id, ttl_s}; });
    m.def("create_keyed_store", &create_keyed_store, nb::arg("executor"), nb::arg("base_entry"), nb::arg("capacity"), nb::arg("owner"),
          nb::arg("dirty_limit"), nb::arg("writes_around"), nb::arg("acks_on_disk"), nb::arg("default_lease_ms"),
          nb::arg("longest_lease_ms"));
}

}  // namespace kbtp
