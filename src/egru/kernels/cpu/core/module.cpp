// The Python face of the core. Buffers come in as addresses: the callers own, shape and check them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "levels.hpp"

namespace nb = nanobind;

// Each part of the core adds itself here: one declaration, one call.
void bind_train(nb::module_& m);
void bind_engine(nb::module_& m);

NB_MODULE(_core, m) {
    m.def("levels", [] {
        std::vector<std::string> names;
        for (int i = 0; i < egru::level_count; ++i)
            if (egru::level_available(static_cast<egru::Level>(i)))
                names.push_back(egru::level_name(static_cast<egru::Level>(i)));
        return names;
    }, "Dispatch levels built and available on this machine, slowest first.");
    m.def("level", [] { return std::string(egru::level_name(egru::current_level())); }, "The level in force.");
    m.def("force_level", &egru::force_level, nb::arg("name"), "Use this level from now on; 'auto' undoes.");
    m.def("compiler", [] { return std::string(__VERSION__); }, "The compiler that built the core.");
    m.def("use_huge_pages", [](std::uintptr_t address, std::int64_t bytes) {
#ifdef MADV_HUGEPAGE
        constexpr std::uintptr_t page = 2u << 20;
        const std::uintptr_t begin = (address + page - 1) / page * page, end = (address + (std::uintptr_t)bytes) / page * page;
        if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
        (void)address, (void)bytes;
#endif
    }, nb::arg("address"), nb::arg("bytes"), "Ask for large pages under a fresh buffer, where the system has them.");
    bind_train(m);
    bind_engine(m);
}
