// The elementwise work of S on a CPU, fused: each value is read and written once while in cache.
//
// PyTorch needs five passes and two fp32 copies for the same (see TorchKernels in kernels.py, which
// computes the same without a compiler). Plain C functions, called through ctypes with pointers.

#include <cstdint>
#include <cstring>

namespace {

inline float to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to nearest, ties to even, as PyTorch does.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// exp(x) for x <= 0 to about 2e-7, without a branch so that loops over it become SIMD. Below -87
// the result stays at 1e-38 rather than vanish; NaN stays NaN.
inline float exp_nonpositive(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float scaled = x * 1.44269504f;                            // exp(x) = 2^scaled
  const float whole = (scaled + 12582912.0f) - 12582912.0f;        // nearest integer
  const float f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // |f| <= ln(2) / 2
  float p = 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;  // 2^whole
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// logits [t, n] in place -> exp(logits - new maximum); maximum [n] and sum [n] carried on.
EXPORT void exp_tile_bf16(uint16_t *logits, int64_t t, int64_t n, float *maximum, float *sum) {
  constexpr int64_t kColumns = 512;  // tokens at a time: long enough for the prefetcher
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t columns = n - first < kColumns ? n - first : kColumns;
    float new_max[kColumns], column_sum[kColumns] = {};
    for (int64_t i = 0; i < columns; ++i) new_max[i] = maximum[first + i];
    for (int64_t j = 0; j < t; ++j) {
      const uint16_t *row = logits + j * n + first;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        const float value = to_float(row[i]);
        new_max[i] = value > new_max[i] ? value : new_max[i];
      }
    }
    for (int64_t j = 0; j < t; ++j) {
      uint16_t *row = logits + j * n + first;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        const float value = exp_nonpositive(to_float(row[i]) - new_max[i]);
        row[i] = to_bf16(value);
        column_sum[i] += value;
      }
    }
    for (int64_t i = 0; i < columns; ++i) {
      float &total = sum[first + i];
      // Before the first tile the maximum is -inf and the sum 0.
      if (total != 0.0f) total *= exp_nonpositive(maximum[first + i] - new_max[i]);
      total += column_sum[i];
      maximum[first + i] = new_max[i];
    }
  }
}

// transposed [n, t] = tile [t, n].
EXPORT void transpose_bf16(const uint16_t *tile, int64_t t, int64_t n, uint16_t *transposed) {
  constexpr int64_t kRows = 32, kColumns = 64;  // a row of the result gets whole cache lines
  for (int64_t row = 0; row < t; row += kRows) {
    for (int64_t column = 0; column < n; column += kColumns) {
      if (row + kRows > t || column + kColumns > n) {
        for (int64_t j = row; j < t && j < row + kRows; ++j)
          for (int64_t i = column; i < n && i < column + kColumns; ++i)
            transposed[i * t + j] = tile[j * n + i];
        continue;
      }
      uint32_t pairs[kRows / 2][kColumns];  // two rows as one, so that half as many words move
      for (int64_t j = 0; j < kRows / 2; ++j) {
        const uint16_t *low = tile + (row + 2 * j) * n + column, *high = low + n;
#pragma omp simd
        for (int64_t i = 0; i < kColumns; ++i)
          pairs[j][i] = low[i] | static_cast<uint32_t>(high[i]) << 16;
      }
      for (int64_t i = 0; i < kColumns; ++i) {
        uint32_t words[kRows / 2];
        for (int64_t j = 0; j < kRows / 2; ++j) words[j] = pairs[j][i];
        std::memcpy(transposed + (column + i) * t + row, words, sizeof words);
      }
    }
  }
}

// total [n, h] = total * factor [n] + part [n, h].
EXPORT void rescale_add_bf16(float *total, const float *factor, const uint16_t *part, int64_t n,
                             int64_t h) {
  for (int64_t i = 0; i < n; ++i) {
    float *row = total + i * h;
    const uint16_t *added = part + i * h;
    const float scale = factor[i];
#pragma omp simd
    for (int64_t j = 0; j < h; ++j) row[j] = row[j] * scale + to_float(added[j]);
  }
}

// scaled [n, h] = x * factor [n].
EXPORT void scale_bf16(const uint16_t *x, const float *factor, int64_t n, int64_t h,
                       uint16_t *scaled) {
  for (int64_t i = 0; i < n; ++i) {
    const float scale = factor[i];
#pragma omp simd
    for (int64_t j = 0; j < h; ++j) scaled[i * h + j] = to_bf16(to_float(x[i * h + j]) * scale);
  }
}

// total [count] += part [count].
EXPORT void add_bf16(float *total, const uint16_t *part, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) total[j] += to_float(part[j]);
}
