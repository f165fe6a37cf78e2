#include "pdl.h"

#include <atomic>

#include "tilekernels/tilekernels.h"

namespace tk {

namespace {

std::atomic<bool> process_pdl;
thread_local int32_t thread_pdl = TK_PDL_DEFAULT;

}  // namespace

bool is_pdl_on() {
  const int32_t mode = thread_pdl;
  return mode == TK_PDL_DEFAULT ? process_pdl.load(std::memory_order_relaxed) : mode == TK_PDL_ON;
}

}  // namespace tk

void tk_set_pdl(int32_t enabled) { tk::process_pdl.store(enabled != 0, std::memory_order_relaxed); }

int32_t tk_get_pdl(void) { return tk::process_pdl.load(std::memory_order_relaxed) ? 1 : 0; }

tk_pdl_mode tk_set_thread_pdl(tk_pdl_mode mode) {
  const auto previous = static_cast<tk_pdl_mode>(tk::thread_pdl);
  tk::thread_pdl = mode == TK_PDL_OFF || mode == TK_PDL_ON ? mode : TK_PDL_DEFAULT;
  return previous;
}
