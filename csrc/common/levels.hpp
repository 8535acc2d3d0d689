// Dispatch levels: the instruction sets that kernels are compiled for, and the choice of one at run time.
//
// A kernel source is compiled once per level, with EGRU_LEVEL set to the level's name, into the namespace
// egru::EGRU_LEVEL. It exports a table of function pointers; EGRU_PICK returns the table of the current level. Such
// sources must not instantiate templates of the standard library: the linker keeps a single copy of each instance,
// possibly one that needs instructions which this machine does not have.
#pragma once

#include <string>

namespace egru {

// The levels of this architecture, slowest first. CMakeLists.txt has the compiler flags of each.
#if defined(EGRU_X86)
#define EGRU_LEVELS(LEVEL) LEVEL(plain) LEVEL(avx2) LEVEL(avx512) LEVEL(avx512_bf16)
#elif defined(EGRU_ARM)
#define EGRU_LEVELS(LEVEL) LEVEL(plain) LEVEL(neon) LEVEL(neon_dot)
#else
#define EGRU_LEVELS(LEVEL) LEVEL(plain)
#endif

#define EGRU_ENUMERATOR(level) level,
#define EGRU_ONE(level) +1
enum class Level : int { EGRU_LEVELS(EGRU_ENUMERATOR) };
constexpr int level_count = 0 EGRU_LEVELS(EGRU_ONE);

const char* level_name(Level level);
bool level_available(Level level);  // built, and supported by this processor
Level best_level();

// The current level: the one set by force_level, or else by EGRU_CPU_LEVEL, or else the best.
// Throws std::invalid_argument if EGRU_CPU_LEVEL is unknown or not available.
Level current_level();
void force_level(const std::string& name);  // "" or "auto": back to the default; throws std::invalid_argument

// Declare one table per level. In a header:  EGRU_DECLARE_TABLE(TrainTable, train_table)
// in the kernel source:                       namespace egru::EGRU_LEVEL { const TrainTable train_table{...}; }
// where it is called:                         EGRU_PICK(train_table).forward(...)
#if defined(EGRU_X86)
#define EGRU_DECLARE_TABLE(Type, name)                      \
    namespace egru::plain { extern const Type name; }       \
    namespace egru::avx2 { extern const Type name; }        \
    namespace egru::avx512 { extern const Type name; }      \
    namespace egru::avx512_bf16 { extern const Type name; }
#define EGRU_PICK(name) \
    (*::egru::pick({&::egru::plain::name, &::egru::avx2::name, &::egru::avx512::name, &::egru::avx512_bf16::name}))
#elif defined(EGRU_ARM)
#define EGRU_DECLARE_TABLE(Type, name)                   \
    namespace egru::plain { extern const Type name; }    \
    namespace egru::neon { extern const Type name; }     \
    namespace egru::neon_dot { extern const Type name; }
#define EGRU_PICK(name) (*::egru::pick({&::egru::plain::name, &::egru::neon::name, &::egru::neon_dot::name}))
#else
#define EGRU_DECLARE_TABLE(Type, name) \
    namespace egru::plain { extern const Type name; }
#define EGRU_PICK(name) (::egru::plain::name)
#endif

template <class Table>
const Table* pick(const Table* const (&tables)[level_count]) {
    return tables[static_cast<int>(current_level())];
}

}  // namespace egru
