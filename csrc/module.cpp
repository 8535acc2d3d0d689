// The Python face of the core. Buffers come in as addresses: the callers own, shape and check them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/levels.hpp"
#include "common/memory.hpp"

namespace nb = nanobind;

// Each part of the core adds itself here: one declaration, one call.
void bind_train(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_continuous(nb::module_& m);

NB_MODULE(_core, m) {
    // A graph that is alive when the interpreter ends is no leak, but nanobind would print it as one.
    nb::set_leak_warnings(false);
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
    m.def("allocate", [](std::size_t bytes) {
        auto* block = new egru::Block(egru::take_memory(bytes));
        nb::capsule owner(block, [](void* held) noexcept {
            auto* given = static_cast<egru::Block*>(held);
            egru::give_memory(*given);
            delete given;
        });
        return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(block->address, {bytes}, owner);
    }, nb::arg("bytes"), "A fresh or reused array of bytes, kept for reuse when nothing refers to it any more.");
    m.def("memory_kept", &egru::memory_kept, "Bytes kept for reuse that nothing refers to.");
    m.def("release_memory", &egru::release_memory, "Give the memory kept for reuse back to the system.");
    bind_train(m);
    bind_engine(m);
    bind_continuous(m);
}
