#include "common/levels.hpp"

#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>

#if defined(EGRU_X86)
#include <cpuid.h>
#elif defined(EGRU_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(EGRU_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(EGRU_ARM) && defined(_WIN32)
#include <windows.h>
#endif

namespace egru {
namespace {

#define EGRU_NAME(level) #level,
constexpr const char* names[level_count] = {EGRU_LEVELS(EGRU_NAME)};
constexpr int unset = -1;
std::atomic<int> forced{unset};

#ifdef EGRU_X86
// __builtin_cpu_supports would be shorter, but not every runtime library has it on Windows.
Level find_best_level() {
    unsigned a = 0, b = 0, c = 0, d = 0, low = 0, high = 0;
    const auto all = [](unsigned word, std::initializer_list<int> bits) {
        for (const int bit : bits)
            if ((word >> bit & 1) == 0) return false;
        return true;
    };
    __get_cpuid(1, &a, &b, &c, &d);
    if (!all(c, {12, 27, 28})) return Level::plain;  // fma, osxsave, avx
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // registers that the system saves
    if (!all(low, {1, 2})) return Level::plain;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !all(b, {3, 5, 8})) return Level::plain;  // bmi, avx2, bmi2
    if (!all(low, {5, 6, 7}) || !all(b, {16, 17, 30, 31})) return Level::avx2;                // avx512 f, dq, bw, vl
    if (!all(c, {1, 6, 11})) return Level::avx512;                                            // vbmi, vbmi2, vnni
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !all(a, {5})) return Level::avx512;       // bf16
    return Level::avx512_bf16;
}
#endif

#ifdef EGRU_ARM
// Whether the processor has the dot products of signed and unsigned bytes, which Arm calls FEAT_DotProd.
bool has_dot_products() {
#if defined(__linux__)
    constexpr unsigned long asimd_dp = 1ul << 20;  // HWCAP_ASIMDDP
    return (getauxval(AT_HWCAP) & asimd_dp) != 0;
#elif defined(__APPLE__)
    int value = 0;
    std::size_t size = sizeof value;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &size, nullptr, 0) == 0 && value != 0;
#elif defined(_WIN32)
    return IsProcessorFeaturePresent(43) != 0;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#else
    return false;
#endif
}
#endif

Level parse(const std::string& name, const char* source) {
    std::string known;
    for (int i = 0; i < level_count; ++i) {
        if (name == names[i]) {
            if (!level_available(static_cast<Level>(i)))
                throw std::invalid_argument(std::string(source) + ": level '" + name +
                                            "' is not available on this machine or in this build; the best is '" +
                                            level_name(best_level()) + "'");
            return static_cast<Level>(i);
        }
        known += std::string(i ? ", " : "") + names[i];
    }
    throw std::invalid_argument(std::string(source) + ": unknown level '" + name + "'; expected auto, " + known);
}

}  // namespace

const char* level_name(Level level) { return names[static_cast<int>(level)]; }

bool level_available(Level level) {
#if defined(EGRU_X86)
    static const Level best = find_best_level();
    return static_cast<int>(level) <= static_cast<int>(best);
#elif defined(EGRU_ARM)
    return level != Level::neon_dot || has_dot_products();  // every 64-bit Arm processor has NEON
#else
    return level == Level::plain;
#endif
}

Level best_level() {
    for (int i = level_count - 1; i > 0; --i)
        if (level_available(static_cast<Level>(i))) return static_cast<Level>(i);
    return Level::plain;
}

Level current_level() {
    const int now = forced.load(std::memory_order_relaxed);
    if (now != unset) return static_cast<Level>(now);
    const char* wanted = std::getenv("EGRU_CPU_LEVEL");
    const bool automatic = wanted == nullptr || *wanted == '\0' || std::string(wanted) == "auto";
    const Level level = automatic ? best_level() : parse(wanted, "EGRU_CPU_LEVEL");
    forced.store(static_cast<int>(level), std::memory_order_relaxed);
    return level;
}

void force_level(const std::string& name) {
    forced.store(name.empty() || name == "auto" ? unset : static_cast<int>(parse(name, "force_level")));
}

}  // namespace egru
