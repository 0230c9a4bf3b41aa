// Ten thousand connections, each with a message, an executed request and an orderly or a sudden end, and nothing left behind: the leak
// sanitizer looks at exit, and descriptors are counted. `leak [CONNECTIONS]`.
#include <dirent.h>

#include "../fuzz/harness.hpp"

using namespace kbtp;

namespace {

int descriptors() {
    int count = 0;
    DIR* folder = ::opendir("/proc/self/fd");
    while (::readdir(folder)) ++count;
    ::closedir(folder);
    return count;
}

Completion next(CompletionQueue& cq, u32 qp) {
    static std::vector<Completion> waiting;
    for (int rounds = 0; rounds < 2000; ++rounds) {
        for (auto it = waiting.begin(); it != waiting.end(); ++it) {
            if (it->qp != qp) continue;
            const Completion c = *it;
            waiting.erase(it);
            return c;
        }
        cq.wait(0.01);
        const std::vector<Completion> come = cq.poll(64);
        waiting.insert(waiting.end(), come.begin(), come.end());
        std::erase_if(waiting, [](const Completion& c) { return c.op == Op::receive && c.status == Status::flushed; });
    }
    FUZZ_CHECK(!"no completion came");
    return {};
}

void expect(CompletionQueue& cq, const QueuePair& qp, Op op) {
    const Completion c = next(cq, qp.number());
    FUZZ_CHECK(c.op == op);
}

void one_connection(Device& client, Device& server, Listener& listener, const std::shared_ptr<CompletionQueue>& cq, int number) {
    const u32 pd = client.new_pd(), server_pd = server.new_pd();
    std::array<u8, 128> out{}, in{};
    const auto source = client.regions().add(pd, 0, {out.data()}, out.size(), out.size());
    const auto sink = server.regions().add(server_pd, access::local_write, {in.data()}, in.size(), in.size());
    const auto active = client.create_qp(pd, cq, {.send_depth = 8, .receive_depth = 8});
    active->connect("127.0.0.1", listener.port(), {});
    std::vector<std::shared_ptr<PendingConnection>> pending;
    for (int rounds = 0; pending.empty() && rounds < 2000; ++rounds) {
        cq->wait(0.01);
        pending = listener.poll();
    }
    FUZZ_CHECK(pending.size() == 1);
    const auto passive = pending[0]->create_qp(server_pd, cq, {.send_depth = 8, .receive_depth = 8});
    const ReceiveRequest receive{0, 0, sink->stag(), 128};
    FUZZ_CHECK(passive->post_receive({&receive, 1}) == QueuePair::Posted::ok);
    passive->accept({});
    expect(*cq, *active, Op::connected);
    WorkRequest send{};
    send.op = Op::send;
    send.length = 100;
    send.local_stag = source->stag();
    FUZZ_CHECK(active->post_send({&send, 1}) == QueuePair::Posted::ok);
    expect(*cq, *passive, Op::connected);
    expect(*cq, *passive, Op::receive);
    if (number % 3 == 0)
        active->abort();
    else
        active->close(1.0);
    expect(*cq, *active, Op::disconnected);
    expect(*cq, *passive, Op::disconnected);
    client.regions().remove(source);
    server.regions().remove(sink);
}

}  // namespace

int main(int count, char** arguments) {
    const int connections = count > 1 ? std::atoi(arguments[1]) : 10'000;
    const auto client = std::make_shared<Device>(DeviceOptions{}), server = std::make_shared<Device>(DeviceOptions{.progress_threads = 3});
    client->start();
    server->start();
    const auto cq = std::make_shared<CompletionQueue>();
    const auto listener = server->listen("127.0.0.1", 0, cq, 5.0, 64);
    int before = 0;
    for (int i = 0; i < connections; ++i) {
        one_connection(*client, *server, *listener, cq, i);
        if (i == 10) before = descriptors();
    }
    ::usleep(50'000);
    const int after = descriptors();
    std::printf("%d connections; %d descriptors open after the first ones, %d at the end\n", connections, before, after);
    FUZZ_CHECK(after <= before + 2);
    listener->close();
    client->close();
    server->close();
}
