// The Python face of a client's usual calls (client_calls.hpp): what a call is about is kept here until it is over.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "client_calls.hpp"
#include "module.hpp"
#include "python_arrays.hpp"
#include "python_values.hpp"

namespace nb = nanobind;

namespace kbtp {
namespace {

TimePoint until(double timeout_s) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
}

class PyClientCalls {
  public:
    using Result = ClientCalls::Result;

    PyClientCalls(std::shared_ptr<QueuePair> pair, std::shared_ptr<HandleCache> cache, const nb::bytes& prefix, const StoreOptions& options,
                  std::vector<u64> handles)
        : calls_(std::move(pair), std::move(cache), options, std::move(handles)), begun_(hash_of(prefix)) {}

    Result get(nb::handle keys, nb::handle where, double timeout_s) {
        if (!take(keys, where, true)) return Result::refused;
        kind_ = Kind::get;
        return calls_.prepare_get(ids_, places()) ? begin(until(timeout_s)) : Result::refused;
    }

    Result look_up(nb::handle keys, u32 flags, double timeout_s) {
        take_ids(keys);
        kind_ = Kind::lookup;
        return !ids_.empty() && calls_.prepare_lookup(ids_, flags) ? begin(until(timeout_s)) : Result::refused;
    }

    Result put(nb::handle keys, nb::handle where, u32 flags, double timeout_s) {
        if (!take(keys, where, false)) return Result::refused;
        kind_ = Kind::put;
        return calls_.prepare_put(ids_, places(), flags) ? begin(until(timeout_s)) : Result::refused;
    }

    Result resume(double timeout_s) { return resume(until(timeout_s)); }

    void give_up() {
        if (!is_running_) return;
        {
            nb::gil_scoped_release nogil;
            calls_.give_up();
        }
        finish();
    }

    // Of the last get: a status (u16) and a length (int64) of each value.
    nb::bytes statuses() const { return nb::bytes(statuses_.data(), statuses_.size() * sizeof(u16)); }
    nb::object lengths() const {
        return nb::steal(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(lengths_.data()),
                                                       static_cast<Py_ssize_t>(lengths_.size() * sizeof lengths_[0])));
    }

    // Of the last put, if not all values were stored: what became of each, its id, and the handle that was used, now the caller's.
    nb::bytes results() const { return nb::bytes(results_.data(), results_.size() * sizeof(PutResult)); }
    nb::bytes ids() const { return nb::bytes(ids_.data(), ids_.size()); }
    nb::bytes used() const { return nb::bytes(used_.data(), used_.size() * sizeof(u64)); }

  private:
    enum class Kind : u8 { get, put, lookup };

    ValuePlaces places() const { return {addresses_, lengths_in_, ids_.size() / 16}; }

    void take_ids(nb::handle keys) {
        if (PyList_Check(keys.ptr()) || PyTuple_Check(keys.ptr())) {
            ids_ = ids_of(begun_, keys);
        } else {
            const Buffer octets(keys, false);
            ids_.assign(octets.data(), octets.data() + octets.size());
        }
    }

    // Keys, or their ids as octets; and buffers, or a pair of arrays that has the addresses and the lengths of pieces. False: no such
    // thing.
    bool take(nb::handle keys, nb::handle where, bool writable) {
        take_ids(keys);
        const std::size_t count = ids_.size() / 16;
        if (PyTuple_Check(where.ptr()) && PyTuple_GET_SIZE(where.ptr()) == 2) {
            const Buffer a(PyTuple_GET_ITEM(where.ptr(), 0), false), l(PyTuple_GET_ITEM(where.ptr(), 1), false);
            const auto addresses = a.as<const u64>();
            const auto lengths = l.as<const u32>();
            addresses_.assign(addresses.begin(), addresses.end());
            lengths_in_.assign(lengths.begin(), lengths.end());
            return count > 0 && addresses_.size() == lengths_in_.size() && addresses_.size() % count == 0 && !addresses_.empty();
        }
        if (!PyList_Check(where.ptr())) return false;
        addresses_.clear();
        lengths_in_.clear();
        for (nb::handle buffer : nb::borrow<nb::list>(where)) {
            const auto place = place_of(buffer, writable);
            if (!place) return false;
            addresses_.push_back(place->address);
            lengths_in_.push_back(place->length);
        }
        return count > 0 && addresses_.size() == count;
    }

    Result begin(TimePoint until) {
        Result result;
        {
            nb::gil_scoped_release nogil;
            result = calls_.begin();
        }
        is_running_ = result == Result::interrupted;
        return is_running_ ? resume(until) : result;
    }

    Result resume(TimePoint until) {
        Result result;
        {
            nb::gil_scoped_release nogil;
            result = calls_.resume(until);
        }
        if (result != Result::done) return result;
        if (kind_ == Kind::get && calls_.is_asking()) {
            const auto settled = calls_.settle_gets(ids_, places());
            is_running_ = false;
            if (!settled) return begin(until);
            if (*settled == Result::refused) return Result::refused;
        }
        return finish();
    }

    Result finish() {
        is_running_ = false;
        if (kind_ == Kind::put) return calls_.finish_put(ids_, results_, used_) ? Result::done : Result::partly;
        if (kind_ == Kind::lookup) return calls_.finish_lookup(ids_, lengths_) ? Result::done : Result::refused;
        return calls_.finish_get(ids_, places(), statuses_, lengths_);
    }

    ClientCalls calls_;
    const Sha256 begun_;
    std::vector<u8> ids_;
    std::vector<u64> addresses_, used_;
    std::vector<u32> lengths_in_;
    std::vector<std::int64_t> lengths_;
    std::vector<u16> statuses_;
    std::vector<PutResult> results_;
    Kind kind_ = Kind::get;
    bool is_running_ = false;
};

// LOADs that are waited for at once.
class PyLoadCall {
  public:
    using Result = WholeCall::Result;

    PyLoadCall(std::shared_ptr<QueuePair> pair, u32 sequence)
        : call_(std::move(pair)), sequence_(kLoadCallSequences | (sequence & kSequenceMask)) {}

    Result begin(nb::handle handles, nb::handle generations, u32 stag, nb::handle offsets, nb::handle lengths, u16 flags,
                 double timeout_s) {
        batch_ = load_batch(sequence_, handles, generations, stag, offsets, lengths, flags);
        nb::gil_scoped_release nogil;
        const Result result = call_.begin(batch_);
        return result == Result::interrupted ? call_.resume(until(timeout_s)) : result;
    }
    Result resume(double timeout_s) {
        nb::gil_scoped_release nogil;
        return call_.resume(until(timeout_s));
    }
    void give_up() {
        nb::gil_scoped_release nogil;
        call_.abandon();
    }
    std::shared_ptr<LoadBatch> batch() const { return batch_; }

  private:
    WholeCall call_;
    const u32 sequence_;
    std::shared_ptr<LoadBatch> batch_;
};

}  // namespace

void bind_calls(nb::module_& m) {
    nb::class_<PyLoadCall>(m, "LoadCall")
        .def(nb::init<std::shared_ptr<QueuePair>, u32>(), nb::arg("pair"), nb::arg("sequence"))
        .def("begin", [](PyLoadCall& c, nb::handle h, nb::handle g, u32 s, nb::handle o, nb::handle l, u16 f,
                         double t) { return static_cast<int>(c.begin(h, g, s, o, l, f, t)); })
        .def("resume", [](PyLoadCall& c, double t) { return static_cast<int>(c.resume(t)); })
        .def("give_up", &PyLoadCall::give_up)
        .def_prop_ro("batch", &PyLoadCall::batch);
    nb::class_<PyClientCalls>(m, "ClientCalls")
        .def(
            "__init__",
            [](PyClientCalls* self, std::shared_ptr<QueuePair> pair, std::shared_ptr<HandleCache> cache, const nb::bytes& prefix,
               u64 tenant, u32 inline_bytes, u32 block_bytes, u32 publish_items, u32 get_items, u32 lookup_items, nb::handle handles) {
                const Buffer all(handles, false);
                const auto each = all.as<const u64>();
                const StoreOptions options{tenant, inline_bytes, block_bytes, publish_items, get_items, lookup_items};
                new (self) PyClientCalls(std::move(pair), std::move(cache), prefix, options, {each.begin(), each.end()});
            },
            nb::arg("pair"), nb::arg("cache"), nb::arg("prefix"), nb::arg("tenant"), nb::arg("inline_bytes"), nb::arg("block_bytes"),
            nb::arg("publish_items"), nb::arg("get_items"), nb::arg("lookup_items"), nb::arg("handles"))
        .def("get", [](PyClientCalls& c, nb::handle k, nb::handle w, double t) { return static_cast<int>(c.get(k, w, t)); })
        .def("put", [](PyClientCalls& c, nb::handle k, nb::handle w, u32 f, double t) { return static_cast<int>(c.put(k, w, f, t)); })
        .def("look_up", [](PyClientCalls& c, nb::handle k, u32 f, double t) { return static_cast<int>(c.look_up(k, f, t)); })
        .def("resume", [](PyClientCalls& c, double t) { return static_cast<int>(c.resume(t)); })
        .def("give_up", &PyClientCalls::give_up)
        .def("lengths", &PyClientCalls::lengths)
        .def("statuses", &PyClientCalls::statuses)
        .def("ids", &PyClientCalls::ids)
        .def("results", &PyClientCalls::results)
        .def("used", &PyClientCalls::used);
}

}  // namespace kbtp
