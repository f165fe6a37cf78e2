// Each finding is a line of the file's own, "#: kernel<TAB>arch<TAB>general or missing<TAB>axis=value<TAB>...", and the
// profile is made of the lines. Processes that share a file add to each other's lines under a lock.
#include "record.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"
#include "message.h"

namespace tk {

namespace {

constexpr size_t kFileBytes = 1 << 18;  // some thousand lines; what does not fit is left out
constexpr size_t kLineBytes = 1024;
constexpr char kMark[] = "#: ";
constexpr char kHead[] =
    "# Written by tilekernels, because TILEKERNELS_RECORD names this file: calls that this build did not hold, or ran "
    "in a\n"
    "# general form. A profile: python -m build_tools build --profile FILE, or make pack PROFILE=FILE\n";

// Text that is cut where it does not fit.
class Text {
 public:
  Text(char* data, size_t size) : data_(data), size_(size) { data_[0] = 0; }
  [[gnu::format(printf, 2, 3)]] void add(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int written = std::vsnprintf(data_ + length_, size_ - length_, format, arguments);
    va_end(arguments);
    if (written > 0) length_ += static_cast<size_t>(written);
    if (length_ >= size_) length_ = size_ - 1;
  }
  const char* data() const { return data_; }
  size_t length() const { return length_; }

 private:
  char* data_;
  size_t size_, length_ = 0;
};

// The buffers of the one record at a time, allocated by the first.
struct Buffers {
  char old_text[kFileBytes], new_text[kFileBytes], lines[kFileBytes];
};
Buffers* buffers = nullptr;

void add_value(Text& text, const AxisDesc& axis, int32_t digit) {
  switch (axis.kind) {
    case TK_AXIS_FLAG: text.add("%s", axis.values[digit] != 0 ? "true" : "false"); break;
    case TK_AXIS_NUMBER:
    case TK_AXIS_ITEMSIZE_OF: text.add("%lld", static_cast<long long>(axis.values[digit])); break;
    default: text.add("\"%s\"", axis.labels[digit]);
  }
}

void make_line(Text& line, const char* name, const KernelDesc* kernel, const int32_t* digits, const char* arch,
               bool general) {
  line.add("%s\t%s\t%s", name, arch != nullptr ? arch : "", general ? "general" : "missing");
  for (int32_t i = 0; kernel != nullptr && digits != nullptr && i < kernel->num_axes; ++i) {
    if (digits[i] < 0) continue;
    line.add("\t%s=", kernel->axes[i].name);
    add_value(line, kernel->axes[i], digits[i]);
  }
  line.add("\n");
}

// A walk over the lines of a text: calls visit(start, length) for each, the newline included.
template <class Visit>
void for_each_line(const char* text, Visit visit) {
  for (const char* start = text; *start != 0;) {
    const char* end = std::strchr(start, '\n');
    const size_t length = end != nullptr ? static_cast<size_t>(end - start) + 1 : std::strlen(start);
    visit(start, length);
    start += length;
  }
}

bool holds_line(const char* text, const char* line, size_t length) {
  bool found = false;
  for_each_line(text, [&](const char* start, size_t other) {
    found = found || (other == length && std::memcmp(start, line, length) == 0);
  });
  return found;
}

// Adds the index-th field of a line (fields end by a tab or the newline) to `text` unless it is there: a list of its
// own.
struct Field {
  const char* start;
  int length;
};

Field field_of(const char* line, int index) {
  for (; index > 0 && *line != 0 && *line != '\n'; ++line) index -= *line == '\t';
  return {line, static_cast<int>(std::strcspn(line, "\t\n"))};
}

bool equal(Field field, const char* text, size_t length) {
  return static_cast<size_t>(field.length) == length && std::memcmp(field.start, text, length) == 0;
}

// Whether an earlier line than `line` has the same kernel (part < 0), the same arch (part 1), or the same axis value.
template <class Same>
bool stands_before(const char* lines, const char* line, Same same) {
  bool found = false;
  for_each_line(lines, [&](const char* start, size_t) { found = found || (start < line && same(start)); });
  return found;
}

bool same_kernel(const char* first, const char* second) {
  const Field name = field_of(first, 0);
  return equal(field_of(second, 0), name.start, static_cast<size_t>(name.length));
}

bool has_field(const char* line, Field field) {
  for (int i = 3; field_of(line, i).length > 0; ++i) {
    if (equal(field_of(line, i), field.start, static_cast<size_t>(field.length))) return true;
  }
  return false;
}

void add_archs(Text& text, const char* lines) {
  text.add("archs = [");
  const char* separator = "";
  for_each_line(lines, [&](const char* line, size_t) {
    const Field arch = field_of(line, 1);
    const bool before = stands_before(lines, line, [&](const char* other) {
      return equal(field_of(other, 1), arch.start, static_cast<size_t>(arch.length));
    });
    if (arch.length == 0 || before) return;
    text.add("%s\"%.*s\"", separator, arch.length, arch.start);
    separator = ", ";
  });
  if (*separator == 0 && kNumArchs > 0) text.add("\"%s\"", kArchs[0]);  // no call came as far as a GPU
  text.add("]\n");
}

void add_include(Text& text, const char* lines) {
  text.add("\n[operators]\ninclude = [");
  const char* separator = "";
  for_each_line(lines, [&](const char* line, size_t) {
    if (stands_before(lines, line, [&](const char* other) { return same_kernel(line, other); })) return;
    const Field name = field_of(line, 0);
    text.add("%s\"%.*s\"", separator, name.length, name.start);
    separator = ", ";
  });
  text.add("]\n");
}

// The values of one axis, `prefix` being "fmt=" with its length, in all lines of a kernel.
void add_axis(Text& text, const char* lines, const char* kernel_line, const char* prefix, int prefix_length) {
  text.add("%.*s = [", prefix_length - 1, prefix);
  const char* separator = "";
  for_each_line(lines, [&](const char* line, size_t) {
    if (!same_kernel(kernel_line, line)) return;
    for (int i = 3; field_of(line, i).length > 0; ++i) {
      const Field field = field_of(line, i);
      if (std::strncmp(field.start, prefix, static_cast<size_t>(prefix_length)) != 0) continue;
      const bool before = stands_before(
          lines, line, [&](const char* other) { return same_kernel(line, other) && has_field(other, field); });
      if (before) continue;
      text.add("%s%.*s", separator, field.length - prefix_length, field.start + prefix_length);
      separator = ", ";
    }
  });
  text.add("]\n");
}

void add_tables(Text& text, const char* lines) {
  for_each_line(lines, [&](const char* line, size_t) {
    const Field name = field_of(line, 0);
    if (field_of(line, 3).length == 0) return;  // every value of every axis is wanted
    if (stands_before(lines, line, [&](const char* other) { return same_kernel(line, other); })) return;
    text.add("\n[\"%.*s\"]\n", name.length, name.start);
    for (int i = 3; field_of(line, i).length > 0; ++i) {
      const char* start = field_of(line, i).start;
      add_axis(text, lines, line, start, static_cast<int>(std::strcspn(start, "=")) + 1);
    }
  });
}

// Lines of an earlier writer, without their mark.
void keep_old_lines(Text& lines, const char* old_text) {
  constexpr size_t kMarkLength = sizeof(kMark) - 1;
  for_each_line(old_text, [&](const char* start, size_t length) {
    if (length > kMarkLength && std::strncmp(start, kMark, kMarkLength) == 0 && start[length - 1] == '\n')
      lines.add("%.*s", static_cast<int>(length - kMarkLength), start + kMarkLength);
  });
}

void write_profile(Text& text, const char* lines) {
  text.add("%s", kHead);
  add_archs(text, lines);
  add_include(text, lines);
  add_tables(text, lines);
  text.add("\n");
  for_each_line(lines,
                [&](const char* line, size_t length) { text.add("%s%.*s", kMark, static_cast<int>(length), line); });
}

void update(int file, const char* line, size_t length) {
  const ssize_t size = pread(file, buffers->old_text, kFileBytes - 1, 0);
  buffers->old_text[size > 0 ? size : 0] = 0;
  Text lines(buffers->lines, kFileBytes);
  keep_old_lines(lines, buffers->old_text);
  if (holds_line(lines.data(), line, length)) return;
  lines.add("%s", line);
  Text text(buffers->new_text, kFileBytes);
  write_profile(text, lines.data());
  if (pwrite(file, text.data(), text.length(), 0) == static_cast<ssize_t>(text.length()))
    (void)!ftruncate(file, static_cast<off_t>(text.length()));
}

// A pack leaves it to the library that loads it.
#ifdef TILEKERNELS_PACK
const char* record_file() { return nullptr; }
#else
const char* record_file() { return secure_getenv("TILEKERNELS_RECORD"); }
#endif

enum : int { kUnknown = 0, kOff = 1, kOn = 2 };
std::atomic<int> state;

}  // namespace

bool recording() {
  const int known = state.load(std::memory_order_relaxed);
  if (known != kUnknown) [[likely]]
    return known == kOn;
  const char* file = record_file();
  const bool on = file != nullptr && file[0] != 0;
  state.store(on ? kOn : kOff, std::memory_order_relaxed);
  return on;
}

void record(const char* name, const KernelDesc* kernel, const int32_t* digits, const char* arch, bool general) {
  if (!recording()) return;
  char line_text[kLineBytes];
  Text line(line_text, sizeof(line_text));
  make_line(line, name, kernel, digits, arch, general);
  const SetupLock lock;
  if (buffers == nullptr) buffers = static_cast<Buffers*>(std::calloc(1, sizeof(Buffers)));
  if (buffers == nullptr) return;  // a call must not fail because it cannot be written down
  // Said already by this process: the common case of a call that is made often.
  static char* said = nullptr;
  static size_t said_length = 0;
  if (said == nullptr) said = static_cast<char*>(std::calloc(kFileBytes, 1));
  if (said == nullptr || holds_line(said, line.data(), line.length())) return;
  const char* path = record_file();
  const int file = path == nullptr ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0) return;
  flock(file, LOCK_EX);
  update(file, line.data(), line.length());
  close(file);
  if (said_length + line.length() < kFileBytes) {
    std::memcpy(said + said_length, line.data(), line.length());
    said_length += line.length();
  }
}

void add_profile_values(Message& message, const KernelDesc& kernel, const int32_t* digits) {
  const char* separator = "";
  for (int32_t i = 0; i < kernel.num_axes; ++i) {
    if (digits[i] < 0) continue;
    char value[kLineBytes / 4];
    Text text(value, sizeof(value));
    add_value(text, kernel.axes[i], digits[i]);
    message.add("%s%s = [%s]", separator, kernel.axes[i].name, text.data());
    separator = ", ";
  }
}

}  // namespace tk
