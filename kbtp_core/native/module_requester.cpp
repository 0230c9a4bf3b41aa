// The Python face of the requester's batches of messages (fabric/softrnic.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "device.hpp"
#include "module.hpp"
#include "python_arrays.hpp"

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

nb::object post_puts(QueuePair& q, u32 sequence, u64 tenant, u32 flags, u32 inline_bytes, u32 values_each, nb::handle ids,
                     nb::handle handles, nb::handle addresses, nb::handle lengths, u32 stag, nb::handle offsets) {
    const Buffer i(ids, false), h(handles, false), a(addresses, false), l(lengths, false), o(offsets, false);
    const PutRequest request{tenant,
                             flags,
                             inline_bytes,
                             values_each,
                             stag,
                             i.as<const u8>(),
                             h.as<const u64>(),
                             a.as<const u64>(),
                             o.as<const u64>(),
                             l.as<const u32>(),
                             h.size() ? a.size() / h.size() : 0};
    const std::size_t count = request.handles.size();
    if (count == 0 || values_each == 0 || request.ids.size() != 16 * count || request.addresses.size() != count * request.pieces ||
        request.lengths.size() != request.addresses.size() || request.offsets.size() != count)
        throw std::invalid_argument("a put has as many ids, handles and offsets as values, and as many addresses as lengths");
    std::shared_ptr<MessageBatch> batch;
    {
        nb::gil_scoped_release nogil;
        batch = make_puts(sequence, request);
    }
    return post(q, std::move(batch));
}

nb::list answers(QueuePair& q, const MessageBatch& batch) {
    const auto copies = q.read_batch([&] { return batch.answers(); });
    nb::list out;
    for (const auto& answer : copies) out.append(nb::bytes(answer.data(), answer.size()));
    return out;
}

}  // namespace

void bind_messages(nb::module_& m) {
    nb::class_<MessageBatch, RequestBatch>(m, "MessageBatch");
    m.def("post_messages", &post_messages);
    m.def("post_puts", &post_puts);
    m.def("answers", &answers);
    m.def("put_results", [](QueuePair& q, const MessageBatch& batch, std::size_t count, u32 values_each) {
        const auto results = q.read_batch([&] { return put_results(batch, count, values_each); });
        return nb::bytes(results.data(), results.size() * sizeof(PutResult));
    });
    m.def("settle", [](QueuePair& q, const nb::bytes& answer) { return q.settle({static_cast<const u8*>(answer.data()), answer.size()}); });
}

}  // namespace kbtp
