#include "kernels/isa.h"

#include <stdexcept>

namespace phloem {

std::vector<std::string> supported_isas() {
  std::vector<std::string> names = {"portable"};
#ifdef __x86_64__
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return names;
  names.push_back("avx2");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni"))
    names.push_back("avx512");
#endif
  return names;
}

const KernelTable& kernels_for(const std::string& name) {
  const std::vector<std::string> supported = supported_isas();
  const std::string& chosen = name == "auto" ? supported.back() : name;
  std::string listed;
  for (const std::string& isa : supported) {
    listed += (listed.empty() ? "" : ", ") + isa;
    if (isa != chosen) continue;
    if (isa == "portable") return portable::kernel_table();
#ifdef __x86_64__
    return isa == "avx2" ? avx2::kernel_table() : avx512::kernel_table();
#endif
  }
  throw std::invalid_argument("instruction set " + name + " is not served here; this CPU has: " + listed);
}

}  // namespace phloem
