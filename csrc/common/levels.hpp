// Dispatch levels: the instruction sets each kernel is compiled for, and which of them a run uses.
//
// A kernel source is compiled once per level with EGRU_LEVEL set to the level's name and everything in the namespace
// egru::EGRU_LEVEL; it exports a table of function pointers. `pick` takes the tables of all levels and returns the one
// in force. Such sources must not instantiate templates of the standard library: the linker keeps one copy of those,
// whichever level it was compiled for, and that copy may need instructions this machine lacks.
#pragma once

#include <string>

namespace egru {

enum class Level : int { plain, avx2, avx512, avx512_bf16 };
constexpr int level_count = 4;

const char* level_name(Level level);
bool level_available(Level level);  // built, and this processor has it
Level best_level();

// The level in force: the one forced last, else the one named by EGRU_CPU_LEVEL, else the best.
// Throws std::invalid_argument where EGRU_CPU_LEVEL names none, or one this machine lacks.
Level current_level();
void force_level(const std::string& name);  // "" and "auto" undo; throws std::invalid_argument

// Declares one table per level. In a header:  EGRU_DECLARE_TABLE(TrainTable, train_table)
// in the kernel source:                       namespace egru::EGRU_LEVEL { const TrainTable train_table{...}; }
// where it is called:                         EGRU_PICK(train_table).forward(...)
#ifdef EGRU_X86
#define EGRU_DECLARE_TABLE(Type, name)                      \
    namespace egru::plain { extern const Type name; }       \
    namespace egru::avx2 { extern const Type name; }        \
    namespace egru::avx512 { extern const Type name; }      \
    namespace egru::avx512_bf16 { extern const Type name; }
#define EGRU_PICK(name) \
    (*::egru::pick(&::egru::plain::name, &::egru::avx2::name, &::egru::avx512::name, &::egru::avx512_bf16::name))
#else
#define EGRU_DECLARE_TABLE(Type, name) \
    namespace egru::plain { extern const Type name; }
#define EGRU_PICK(name) (::egru::plain::name)
#endif

template <class Table>
const Table* pick(const Table* plain, const Table* avx2, const Table* avx512, const Table* avx512_bf16) {
    const Table* tables[level_count] = {plain, avx2, avx512, avx512_bf16};
    return tables[static_cast<int>(current_level())];
}

}  // namespace egru
