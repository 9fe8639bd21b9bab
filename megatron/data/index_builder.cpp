// The two sequential loops of sampling, for corpora with many millions of documents, and the
// handler of a signal.
//
// `IndexBuilder` in index_builder.py computes the same arrays without a compiler; its
// docstrings define shapes, dtypes and meaning. Arguments are validated there, by the callers.

#include <fcntl.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Walks the shuffled documents once and notes where every seq_length-th token lies.
Array<int64_t> sample_index(const Array<int32_t> &lengths, const Array<int32_t> &document_index,
                            int64_t seq_length, int64_t num_samples) {
  Array<int64_t> result({num_samples + 1, int64_t{2}});
  const auto length_of = lengths.unchecked<1>();
  const auto documents = document_index.unchecked<1>();
  auto out = result.mutable_unchecked<2>();
  int64_t position = 0;  // in document_index
  int64_t offset = 0;    // in that document, at or past its end while the walk is under way
  for (int64_t sample = 0; sample <= num_samples; ++sample, offset += seq_length) {
    while (offset >= length_of(documents(position))) {
      offset -= length_of(documents(position));
      ++position;
    }
    out(sample, 0) = position;
    out(sample, 1) = offset;
  }
  return result;
}

// Gives each draw to the dataset that is furthest below its share.
py::tuple blend_index(const Array<double> &weights, int64_t size) {
  Array<int16_t> dataset(size);
  Array<int64_t> dataset_sample(size);
  const auto weight = weights.unchecked<1>();
  auto chosen = dataset.mutable_unchecked<1>();
  auto within = dataset_sample.mutable_unchecked<1>();
  std::vector<int64_t> drawn(static_cast<size_t>(weights.shape(0)), 0);
  for (int64_t step = 0; step < size; ++step) {
    const double total = static_cast<double>(std::max<int64_t>(step, 1));
    size_t best = 0;
    double largest = weight(0) * total - static_cast<double>(drawn[0]);
    for (size_t i = 1; i < drawn.size(); ++i) {
      const double deficit = weight(i) * total - static_cast<double>(drawn[i]);
      if (deficit > largest) {
        largest = deficit;
        best = i;
      }
    }
    chosen(step) = static_cast<int16_t>(best);
    within(step) = drawn[best]++;
  }
  return py::make_tuple(dataset, dataset_sample);
}

// Bytes of a mapped file, and what is said if the system cannot read them. Entries are never freed,
// because the handler may run at any time and must not take a lock.
struct Mapped {
  uintptr_t begin, end;
  std::string said, in_json;
  Mapped *next;
};

// A file that a launcher reads, and its content but for the message (1) and the time (2).
struct Report {
  std::string file, form;
};

std::atomic<Mapped *> mapped{nullptr};
std::atomic<Report *> report{nullptr};
struct sigaction handler_before;

// Writes the report; as the handler, it calls async-signal-safe functions only.
bool write_report(const Report &asked, const std::string &message) {
  const int file = open(asked.file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) return false;
  bool whole = true;
  const auto put = [&](const char *text, size_t size) {
    whole = whole && write(file, text, size) == static_cast<ssize_t>(size);
  };
  for (const char &letter : asked.form) {
    if (letter == 1) {
      put(message.data(), message.size());
    } else if (letter == 2) {
      char digits[20];
      size_t first = sizeof(digits);
      for (time_t left = time(nullptr); left > 0; left /= 10) {
        digits[--first] = static_cast<char>('0' + left % 10);
      }
      put(digits + first, sizeof(digits) - first);
    } else {
      put(&letter, 1);
    }
  }
  return close(file) == 0 && whole;
}

// Runs within the instruction that has failed, so only async-signal-safe functions are allowed.
void on_bus_error(int, siginfo_t *info, void *) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (const Mapped *file = mapped.load(); file != nullptr; file = file->next) {
    if (file->begin <= address && address < file->end) {
      const Report *asked = report.load();
      const bool told = asked != nullptr && write_report(*asked, file->in_json);
      const ssize_t size = told ? 0 : write(STDERR_FILENO, file->said.data(), file->said.size());
      _exit(size < 0 ? 1 : 2);
    }
  }
  // Memory of somebody else: the instruction fails again, and the signal has its usual effect.
  sigaction(SIGBUS, &handler_before, nullptr);
}

void report_bus_errors(const std::string &file, const std::string &form) {
  report.store(new Report{file, form});
}

void name_bus_errors(uintptr_t address, size_t size, const std::string &said,
                     const std::string &in_json) {
  if (mapped.load() == nullptr) {
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &handler_before);
  }
  mapped.store(new Mapped{address, address + size, said, in_json, mapped.load()});
}

PYBIND11_MODULE(MODULE_NAME, module) {
  module.def("sample_index", &sample_index);
  module.def("blend_index", &blend_index);
  module.def("name_bus_errors", &name_bus_errors);
  module.def("report_bus_errors", &report_bus_errors);
}
