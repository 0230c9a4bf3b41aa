// The Python face of the disk engines. Arrays cross as they are, results go into arrays that the caller made, and nothing that waits
// holds the GIL.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "../crc32c.hpp"
#include "../module.hpp"
#include "slab.hpp"
#include "store_error.hpp"

namespace nb = nanobind;
using namespace kbtp;
using namespace kbtp::store;

namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const u8, nb::shape<-1, kKeyOctets>, nb::c_contig, nb::device::cpu>;

void same_length(std::size_t count, std::initializer_list<std::size_t> sizes) {
    for (const std::size_t size : sizes)
        if (size != count) throw std::invalid_argument("the arrays of a batch have different lengths");
}

template <class T>
nb::object to_array(const std::vector<T>& v) {
    return nb::bytes(v.data(), v.size() * sizeof(T));
}

void py_put(Slab& slab, Keys keys, In<u64> addresses, In<u32> lengths, In<u32> crcs, In<u64> namespaces, In<u32> expiries,
            Out<u8> outcomes) {
    const std::size_t count = keys.shape(0);
    same_length(count, {addresses.size(), lengths.size(), crcs.size(), namespaces.size(), expiries.size(), outcomes.size()});
    nb::gil_scoped_release nogil;
    slab.put({keys.data(), {addresses.data(), count}, lengths.data(), crcs.data(), namespaces.data(), expiries.data(), outcomes.data()});
}

void py_get(Slab& slab, Keys keys, In<u64> addresses, In<u32> capacities, In<u32> offsets, Out<u8> outcomes, Out<u32> stored,
            Out<u32> copied, Out<u32> crcs) {
    const std::size_t count = keys.shape(0);
    same_length(count, {addresses.size(), capacities.size(), offsets.size(), outcomes.size(), stored.size(), copied.size(), crcs.size()});
    nb::gil_scoped_release nogil;
    slab.get({keys.data(),
              {addresses.data(), count},
              capacities.data(),
              offsets.data(),
              outcomes.data(),
              stored.data(),
              copied.data(),
              crcs.data()});
}

void py_lookup(Slab& slab, Keys keys, Out<u32> lengths) {
    same_length(keys.shape(0), {lengths.size()});
    nb::gil_scoped_release nogil;
    slab.lookup(keys.data(), {lengths.data(), lengths.size()});
}

void py_remove(Slab& slab, Keys keys, Out<u8> were_there) {
    same_length(keys.shape(0), {were_there.size()});
    nb::gil_scoped_release nogil;
    slab.remove(keys.data(), {were_there.data(), were_there.size()});
}

nb::tuple py_list(Slab& slab, std::optional<u64> tenant, std::optional<u64> name_space, u64 cursor, u64 most) {
    Listing listing;
    {
        nb::gil_scoped_release nogil;
        listing = slab.list(tenant, name_space, cursor, most);
    }
    return nb::make_tuple(to_array(listing.keys), to_array(listing.lengths), to_array(listing.expiries), listing.cursor);
}

nb::dict py_stats(Slab& slab) {
    std::vector<std::pair<std::string, u64>> counted;
    {
        nb::gil_scoped_release nogil;
        counted = slab.stats();
    }
    nb::dict d;
    for (const auto& [name, value] : counted) d[name.c_str()] = value;
    return d;
}

nb::dict fault_visits(const Slab& slab) {
    nb::dict d;
    for (std::size_t point = 0; point < std::size(kFaultPointNames); ++point)
        d[kFaultPointNames[point]] = slab.fault_visits(static_cast<FaultPoint>(point));
    return d;
}

// (point, visit, action, amount), the first and the third by name.
using PlannedFault = std::tuple<std::string, u64, std::string, u64>;

template <class Names>
std::size_t number_of(const Names& names, const std::string& name) {
    for (std::size_t i = 0; i < std::size(names); ++i)
        if (name == names[i]) return i;
    throw std::invalid_argument("there is no fault point or action called " + name);
}

std::vector<Fault> faults_from(nb::list plan) {
    static constexpr const char* kActions[] = {"none", "kill",     "kill_after", "lose",      "torn",
                                               "flip", "no_space", "io_error",   "read_only", "hang"};
    std::vector<Fault> faults;
    for (nb::handle item : plan) {
        const auto point = nb::cast<std::string>(item[0]), action = nb::cast<std::string>(item[2]);
        faults.push_back({static_cast<FaultPoint>(number_of(kFaultPointNames, point)), nb::cast<u64>(item[1]),
                          static_cast<FaultAction>(number_of(kActions, action)), nb::cast<u64>(item[3])});
    }
    return faults;
}

void set_limits(TenantLedger& ledger, In<u64> tenants, In<u64> limits, u64 default_limit) {
    same_length(tenants.size(), {limits.size()});
    std::unordered_map<u64, u64> by_tenant;
    for (std::size_t i = 0; i < tenants.size(); ++i) by_tenant[tenants.data()[i]] = limits.data()[i];
    ledger.set_limits(std::move(by_tenant), default_limit);
}

nb::dict py_usage(const TenantLedger& ledger) {
    nb::dict d;
    for (const auto& [tenant, bytes] : ledger.usage()) d[nb::int_(tenant)] = bytes;
    return d;
}

void crc32c_values(In<u64> addresses, In<u32> lengths, Out<u32> crcs) {
    same_length(addresses.size(), {lengths.size(), crcs.size()});
    nb::gil_scoped_release nogil;
    for (std::size_t i = 0; i < crcs.size(); ++i)
        crcs.data()[i] = crc32c_extend(0, reinterpret_cast<const void*>(addresses.data()[i]), lengths.data()[i]);
}

std::shared_ptr<Slab> open_slab(const std::string& folder, u64 capacity_bytes, u64 extent_bytes, bool direct, bool io_uring, u32 io_threads,
                                double io_timeout_s, std::shared_ptr<TenantLedger> ledger, nb::list faults) {
    SlabOptions options{folder, capacity_bytes, extent_bytes, direct, io_uring, io_threads, io_timeout_s, faults_from(faults)};
    nb::gil_scoped_release nogil;
    // A process that was forked off has none of the threads that an end would wait for, so it leaves the store alone.
    const auto end = [opener = ::getpid()](Slab* slab) {
        if (::getpid() == opener) delete slab;
    };
    return {new Slab(options, std::move(ledger)), end};
}

}  // namespace

void kbtp::bind_slab(nb::module_& m) {
    nb::exception<StoreError>(m, "StoreError");

    nb::class_<TenantLedger>(m, "TenantLedger")
        .def(nb::init<>())
        .def("charge", &TenantLedger::charge)
        .def("count", &TenantLedger::count)
        .def("release", &TenantLedger::release)
        .def("set_limits", &set_limits)
        .def("usage", &py_usage)
        .def_prop_ro("refused_count", &TenantLedger::refused);

    const nb::call_guard<nb::gil_scoped_release> nogil;
    nb::class_<Slab>(m, "Slab")
        .def("put", &py_put)
        .def("get", &py_get)
        .def("lookup", &py_lookup)
        .def("remove", &py_remove)
        .def("remove_namespace", &Slab::remove_namespace, nogil)
        .def("expire", &Slab::expire, nogil)
        .def("list", &py_list, nb::arg("tenant").none(), nb::arg("namespace").none(), nb::arg("cursor"), nb::arg("most"))
        .def("stats", &py_stats)
        .def("why_degraded", &Slab::why_degraded)
        .def("fault_visits", &fault_visits)
        .def("sync", &Slab::sync, nogil)
        .def("close", &Slab::close, nogil)
        .def("check_integrity", &Slab::check_integrity, nogil);

    m.def("open_slab", &open_slab, nb::arg("folder"), nb::arg("capacity_bytes"), nb::arg("extent_bytes"), nb::arg("direct"),
          nb::arg("io_uring"), nb::arg("io_threads"), nb::arg("io_timeout_s"), nb::arg("ledger"), nb::arg("faults"));
    m.def("crc32c_values", &crc32c_values, nb::arg("addresses"), nb::arg("lengths"), nb::arg("crcs"));
}
