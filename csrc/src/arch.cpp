#include "arch.h"

#include <cstdlib>
#include <cstring>

namespace tk {

namespace {

// What the last letter of an arch means for binary code.
//   sm_90a: architecture-specific, runs on exactly that compute capability
//   sm_100f: family-specific, runs on the capabilities of its family from its own minor on
//   sm_80: runs on the same major from its own minor on
constexpr int32_t kPlainRank = 100, kFamilyRank = 200, kSpecificRank = 300;

struct Family {
  int32_t major, first_minor, last_minor;
};
// NVIDIA's families: 10.0 and 10.3; 11.0; 12.0 and 12.1.
constexpr Family kFamilies[] = {{10, 0, 3}, {11, 0, 0}, {12, 0, 1}};

struct Wanted {
  int32_t major, minor;
  const char* arch;
};
// 8.6 and 8.7 run sm_80's code; 10.3 and 12.1 have features and limits of their own.
constexpr Wanted kWanted[] = {
    {8, 0, "sm_80"},    {8, 6, "sm_80"},    {8, 7, "sm_80"},    {8, 9, "sm_89"},    {9, 0, "sm_90a"},
    {10, 0, "sm_100a"}, {10, 3, "sm_103a"}, {11, 0, "sm_110a"}, {12, 0, "sm_120a"}, {12, 1, "sm_121a"},
};

}  // namespace

int32_t arch_rank(const char* arch, int32_t major, int32_t minor) {
  if (std::strncmp(arch, "sm_", 3) != 0) return 0;
  char* suffix = nullptr;
  const long number = std::strtol(arch + 3, &suffix, 10);
  const int32_t arch_major = static_cast<int32_t>(number / 10), arch_minor = static_cast<int32_t>(number % 10);
  if (suffix == arch + 3 || arch_major != major || minor < arch_minor) return 0;
  // Among archs of one kind, the later minor is the more specific.
  if (std::strcmp(suffix, "a") == 0) return minor == arch_minor ? kSpecificRank + arch_minor : 0;
  if (std::strcmp(suffix, "") == 0) return kPlainRank + arch_minor;
  if (std::strcmp(suffix, "f") != 0) return 0;
  for (const Family& family : kFamilies) {
    if (family.major == major && minor >= family.first_minor && minor <= family.last_minor)
      return kFamilyRank + arch_minor;
  }
  return 0;
}

const char* wanted_arch(int32_t major, int32_t minor) {
  for (const Wanted& wanted : kWanted) {
    if (wanted.major == major && wanted.minor == minor) return wanted.arch;
  }
  return nullptr;
}

}  // namespace tk
