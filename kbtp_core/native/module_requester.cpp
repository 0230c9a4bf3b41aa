// The Python face of the requester's batches of messages (fabric/softrnic.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstring>

#include "device.hpp"
#include "module.hpp"
#include "python_arrays.hpp"
#include "python_values.hpp"

namespace nb = nanobind;

namespace kbtp {
namespace {

// The batch, or None if the pair has ended.
nb::object post(QueuePair& q, std::shared_ptr<MessageBatch> batch) {
    auto posted = QueuePair::Posted::ok;
    {
        nb::gil_scoped_release nogil;
        posted = q.post_batch(batch);
    }
    return posted == QueuePair::Posted::ok ? nb::cast(batch) : nb::none();
}

nb::object post_messages(QueuePair& q, u32 sequence, const nb::bytes& octets, nb::handle lengths) {
    const Buffer sizes(lengths, false);
    const auto each = sizes.as<const u32>();
    u64 total = 0;
    for (const u32 length : each) total += length;
    if (each.empty() || total != octets.size())
        throw std::invalid_argument("as many octets as the messages have together, and one at least");
    const auto* first = static_cast<const u8*>(octets.data());
    auto copy = std::make_shared<const std::vector<u8>>(first, first + octets.size());
    return post(q, std::make_shared<MessageBatch>(sequence, std::move(copy), std::vector<u32>(each.begin(), each.end())));
}

// `puts` is a fabric.api.Puts.
nb::object post_puts(QueuePair& q, u32 sequence, nb::handle puts) {
    enum Field { ids, tenant, handles, addresses, lengths, offsets, stag, flags, inline_bytes, values_each };
    const auto field = [&](Field at) { return nb::handle(PyTuple_GetItem(puts.ptr(), at)); };
    const Buffer i(field(ids), false), h(field(handles), false), a(field(addresses), false), l(field(lengths), false);
    const Column<u64> o(field(offsets));
    PutRequest request{.tenant = nb::cast<u64>(field(tenant)),
                       .flags = nb::cast<u32>(field(flags)),
                       .inline_bytes = nb::cast<u32>(field(inline_bytes)),
                       .values_each = nb::cast<u32>(field(values_each)),
                       .stag = nb::cast<u32>(field(stag)),
                       .ids = i.as<const u8>(),
                       .handles = h.as<const u64>(),
                       .addresses = a.as<const u64>(),
                       .offsets = {},
                       .lengths = l.as<const u32>(),
                       .pieces = 0};
    const std::size_t count = request.handles.size();
    if (count) request.pieces = request.addresses.size() / count;
    if (count == 0 || request.values_each == 0 || request.ids.size() != 16 * count || request.addresses.size() != count * request.pieces ||
        request.lengths.size() != request.addresses.size() || !o.fits(count))
        throw std::invalid_argument("a put has as many ids, handles and offsets as values, and as many addresses as lengths");
    std::vector<u64> starts(count);
    for (std::size_t at = 0; at < count; ++at) starts[at] = o[at];
    request.offsets = starts;
    std::shared_ptr<MessageBatch> batch;
    {
        nb::gil_scoped_release nogil;
        batch = make_puts(sequence, request);
    }
    if (!batch) throw std::invalid_argument("a value that is longer than inline values may be lies in no region: register its memory");
    return post(q, std::move(batch));
}

nb::object post_lookups(QueuePair& q, u32 sequence, u64 tenant, u32 flags, u32 values_each, nb::handle ids) {
    const Buffer i(ids, false);
    if (i.size() == 0 || i.size() % 16 != 0 || values_each == 0) throw std::invalid_argument("ids have 16 octets each");
    std::shared_ptr<MessageBatch> batch;
    {
        nb::gil_scoped_release nogil;
        batch = make_lookups(sequence, tenant, flags, values_each, i.as<const u8>());
    }
    return post(q, std::move(batch));
}

// What `read` makes of a batch of `q`, as it lies in memory.
template <class Read>
nb::bytes to_bytes(QueuePair& q, Read&& read) {
    decltype(read()) results;
    {
        nb::gil_scoped_release nogil;
        results = q.read_batch(read);
    }
    return nb::bytes(results.data(), results.size() * sizeof(results[0]));
}

nb::list answers(QueuePair& q, const MessageBatch& batch) {
    std::vector<std::vector<u8>> copies;
    {
        nb::gil_scoped_release nogil;
        copies = q.read_batch([&] { return batch.answers(); });
    }
    nb::list out;
    for (const auto& answer : copies) out.append(nb::bytes(answer.data(), answer.size()));
    return out;
}

// Where the memory of n arrays is; false if one of them is not contiguous, not writable though it must be, or has 4 GiB or more.
bool places_of(nb::sequence arrays, bool writable, nb::handle addresses, nb::handle lengths) {
    const Buffer a(addresses, true), l(lengths, true);
    const auto where = a.as<u64>();
    const auto octets = l.as<u32>();
    if (nb::len(arrays) != where.size() || octets.size() != where.size()) throw std::invalid_argument("as many places as arrays");
    std::size_t at = 0;
    for (nb::handle array : arrays) {
        const auto place = place_of(array, writable);
        if (!place) return false;
        where[at] = place->address;
        octets[at++] = place->length;
    }
    return true;
}

}  // namespace

void bind_messages(nb::module_& m) {
    nb::class_<MessageBatch, RequestBatch>(m, "MessageBatch");
    m.def("post_messages", &post_messages);
    m.def("post_puts", &post_puts);
    m.def("answers", &answers);
    m.def("put_results", [](QueuePair& q, const MessageBatch& batch, std::size_t count, u32 values_each) {
        return to_bytes(q, [&] { return put_results(batch, count, values_each); });
    });
    m.def("places_of", &places_of);
    m.def("post_lookups", &post_lookups);
    m.def("lookup_results", [](QueuePair& q, const MessageBatch& batch, std::size_t count, u32 values_each, bool is_prefix) {
        return to_bytes(q, [&] { return lookup_results(batch, count, values_each, is_prefix); });
    });
    m.def("settle", [](QueuePair& q, const nb::bytes& answer) { return q.settle({static_cast<const u8*>(answer.data()), answer.size()}); });
}

}  // namespace kbtp
