// The Python module egru._core. Buffers are passed as addresses: the callers own them and check their shapes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/levels.hpp"
#include "common/memory.hpp"
#include "common/openmp.hpp"

namespace nb = nanobind;

// One function per part of the core.
void bind_sequence(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_continuous(nb::module_& m);

NB_MODULE(_core, m) {
    m.doc() = "The compiled core of egru. Import it through egru.compiled, which handles its absence.";
    // nanobind would report a graph that is alive when the interpreter exits as a leak.
    nb::set_leak_warnings(false);
    m.def("levels", [] {
        std::vector<std::string> names;
        for (int i = 0; i < egru::level_count; ++i)
            if (egru::level_available(static_cast<egru::Level>(i)))
                names.push_back(egru::level_name(static_cast<egru::Level>(i)));
        return names;
    }, "Return the dispatch levels available on this machine, slowest first.");
    m.def("level", [] { return std::string(egru::level_name(egru::current_level())); },
          "Return the current dispatch level.");
    m.def("force_level", &egru::force_level, nb::arg("name"),
          "Set the dispatch level of this process; 'auto' restores the default.");
    m.def("compiler", [] { return std::string(__VERSION__); }, "Return the version of the compiler that built the core.");
    m.def("allocate", [](std::size_t bytes) {
        auto* block = new egru::Block(egru::acquire_block(bytes));
        nb::capsule owner(block, [](void* pointer) noexcept {
            auto* unused = static_cast<egru::Block*>(pointer);
            egru::return_block(*unused);
            delete unused;
        });
        return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(block->address, {bytes}, owner);
    }, nb::arg("bytes"), "Return an uninitialised array whose memory is cached for reuse when the array is deleted.");
    m.def("shares_threads", &egru::openmp_available,
          "Return whether the core runs on torch's threads. If not, it starts its own.");
    m.def("cached_memory", &egru::cached_memory, "Return the number of bytes in the memory cache.");
    m.def("release_memory", &egru::release_memory, "Free all memory in the cache.");
    m.attr("_stub_sha256") = EGRU_STUB_SHA256;  // private, so that the stub does not contain it
    bind_sequence(m);
    bind_engine(m);
    bind_continuous(m);
}
