#include "common/levels.hpp"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(EGRU_ARM) && defined(__linux__)
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
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    switch (level) {
        case Level::plain: return true;
        case Level::avx2: return avx2;
        case Level::avx512: return avx512;
        case Level::avx512_bf16:
            return avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
                   __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bf16");
    }
    return false;
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
