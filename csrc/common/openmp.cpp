#include "common/openmp.hpp"

#ifdef __linux__
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstring>

namespace egru {
namespace {

std::atomic<bool> forked{false};

// The functions of libgomp that run a team; null if it is not loaded.
struct Runtime {
    void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    int (*index)() = nullptr;
    int (*size)() = nullptr;
    int (*size_max)() = nullptr;

    Runtime() {
        find(index, "omp_get_thread_num");
        find(size, "omp_get_num_threads");
        find(size_max, "omp_get_max_threads");
        if (index && size && size_max) find(parallel, "GOMP_parallel");
        if (parallel) pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
    }

private:
    template <class Function>
    static void find(Function& function, const char* name) {
        void* address = dlsym(RTLD_DEFAULT, name);
        Dl_info info;
        if (address == nullptr || dladdr(address, &info) == 0 || std::strstr(info.dli_fname, "libgomp") == nullptr)
            return;
        function = reinterpret_cast<Function>(address);
    }
};

struct Work {
    const Runtime& runtime;
    void (*body)(void*, int, int);
    void* context;
};

const Runtime& runtime() {
    static const Runtime functions;
    return functions;
}

}  // namespace

bool openmp_available() { return runtime().parallel != nullptr && !forked.load(std::memory_order_relaxed); }

bool run_openmp(int threads, void (*body)(void*, int, int), void* context) {
    if (!openmp_available()) return false;
    const Runtime& runtime = egru::runtime();
    Work work{runtime, body, context};
    // A smaller team than torch's would end the threads that it leaves out.
    const int most = runtime.size_max(), size = threads < most ? most : threads;
    runtime.parallel(
        [](void* data) {
            const Work& work = *static_cast<Work*>(data);
            work.body(work.context, work.runtime.index(), work.runtime.size());
        },
        &work, static_cast<unsigned>(size), 0);
    return true;
}

}  // namespace egru
#else
namespace egru {
bool openmp_available() { return false; }
bool run_openmp(int, void (*)(void*, int, int), void*) { return false; }
}  // namespace egru
#endif
