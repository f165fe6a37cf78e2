// Prints the runtime's verdict on lines "arch major minor" of its input: rank, and the arch wanted for that GPU.
#include <iostream>
#include <string>

#include "arch.h"

int main() {
  std::string arch;
  int major = 0, minor = 0;
  while (std::cin >> arch >> major >> minor) {
    const char* wanted = tk::wanted_arch(major, minor);
    std::cout << tk::arch_rank(arch.c_str(), major, minor) << ' ' << (wanted != nullptr ? wanted : "none") << '\n';
  }
}
