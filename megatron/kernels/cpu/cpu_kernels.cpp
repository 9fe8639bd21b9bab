// Elementwise work on a CPU in bf16, fused: each value is read and written once while in cache.
//
// PyTorch needs several passes and fp32 copies for the same (its own form of each function stands
// beside the call, and serves without a compiler). The functions work in the calling thread,
// without the interpreter's lock, on contiguous memory; only copy_rows_bf16 takes strides. One file,
// since by its text it is known whether it was compiled.

#include <pybind11/pybind11.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

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
  // exp(x) = 2^whole exp(f); the low bits of `shifted` are the integer nearest to x / ln(2).
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float whole = shifted - 12582912.0f;
  const float f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // |f| <= ln(2) / 2
  // 1 + f + f^2 (a cubic), of least relative error over that range: 1e-7.
  float p = 8.312524945e-3f;
  p = p * f + 4.189011328e-2f;
  p = p * f + 1.666711446e-1f;
  p = p * f + 4.999923179e-1f;
  p = p * f * f + f + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000u;
  float power;  // 2^whole
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

constexpr uint16_t kMinusInfinity = 0xff80;

// Keys that a row of scores is worked on in: those it sees, in whole vectors, as far as there are
// any. A loop of a few scalars at the end of every row would take as long as its vectors.
constexpr int kWhole = 64;

inline int64_t width_of(int64_t visible, int64_t keys) {
  const int64_t whole = (visible + kWhole - 1) / kWhole * kWhole;
  return whole < keys ? whole : keys;
}

// Gives the keys from `visible` to `width` the `value`.
inline void hide(uint16_t *row, int64_t visible, int64_t width, uint16_t value) {
  const int64_t last = width / kWhole * kWhole == width ? width - kWhole : width;
  for (int64_t j = visible; j < last; ++j) row[j] = value;
  if (last == width) return;
  const auto seen = static_cast<uint16_t>(visible > last ? visible - last : 0);
  for (uint16_t j = 0; j < kWhole; ++j) row[last + j] = j < seen ? row[last + j] : value;
}

// Two neighbouring rows of scores of one head at a time: what one row does at its ends (reduce a
// vector, divide) takes as long as its vectors, unless there is another row to work on meanwhile.
struct Pair {
  int64_t first, second;                   // rows; the same one where a head has no other
  int64_t visible, second_visible, width;  // keys
};

inline Pair pair_at(int64_t row, int64_t queries, int64_t keys) {
  const int64_t query = row % queries, others = query + 1 < queries ? 1 : 0;
  const int64_t visible = keys - queries + query + 1;
  return {row, row + others, visible, visible + others, width_of(visible + others, keys)};
}

// logits [t, n] in place -> exp(logits - new maximum); maximum [n] and sum [n] carried on, and
// shrink [n] = exp(old - new maximum), 0 before the first tile, whose maximum is -inf.
void exp_tile_bf16(uint16_t *logits, int64_t t, int64_t n, float *maximum, float *sum,
                   float *shrink) {
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
      const float old = maximum[first + i];
      const float factor = old == -INFINITY ? 0.0f : exp_nonpositive(old - new_max[i]);
      sum[first + i] = sum[first + i] * factor + column_sum[i];
      shrink[first + i] = factor;
      maximum[first + i] = new_max[i];
    }
  }
}

// logits [t, n] in place -> exp(logits - shift), shift [n].
void shifted_exp_bf16(uint16_t *logits, int64_t t, int64_t n, const float *shift) {
  for (int64_t j = 0; j < t; ++j) {
    uint16_t *row = logits + j * n;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      row[i] = to_bf16(exp_nonpositive(to_float(row[i]) - shift[i]));
    }
  }
}

// transposed [n, t] = tile [t, n].
void transpose_bf16(const uint16_t *tile, int64_t t, int64_t n, uint16_t *transposed) {
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
void rescale_add_bf16(float *total, const float *factor, const uint16_t *part, int64_t n,
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
void scale_bf16(const uint16_t *x, const float *factor, int64_t n, int64_t h,
                uint16_t *scaled) {
  for (int64_t i = 0; i < n; ++i) {
    const float scale = factor[i];
#pragma omp simd
    for (int64_t j = 0; j < h; ++j) scaled[i * h + j] = to_bf16(to_float(x[i * h + j]) * scale);
  }
}

// total [count] += part [count].
void add_bf16(float *total, const uint16_t *part, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) total[j] += to_float(part[j]);
}

// GELU by its tanh approximation, x sigma(u) with u = 2 sqrt(2/pi) (x + 0.044715 x^3), and its
// slope sigma + x sigma (1 - sigma) u'.
void gelu_bf16(const uint16_t *x, int64_t count, uint16_t *value, uint16_t *slope) {
  constexpr float kScale = 1.59576912f, kCubic = kScale * 0.044715f;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float wide = to_float(x[i]), square = wide * wide;
    const float u = wide * (kScale + kCubic * square);
    const float e = exp_nonpositive(u > 0.0f ? -u : u);
    const float inverse = 1.0f / (1.0f + e);
    const float sigma = u > 0.0f ? inverse : e * inverse;
    const float product = wide * sigma;
    // 1 - sigma would lose the digits of a sigma close to 1
    const float rest = u > 0.0f ? e * inverse : inverse;
    value[i] = to_bf16(product);
    slope[i] = to_bf16(sigma + product * rest * (kScale + 3.0f * kCubic * square));
  }
}

// product [count] = x * y.
void multiply_bf16(const uint16_t *x, const uint16_t *y, int64_t count, uint16_t *product) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) product[i] = to_bf16(to_float(x[i]) * to_float(y[i]));
}

// relu(x)^2; NaN stays NaN.
void squared_relu_bf16(const uint16_t *x, int64_t count, uint16_t *value) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float wide = to_float(x[i]), positive = wide < 0.0f ? 0.0f : wide;
    value[i] = to_bf16(positive * positive);
  }
}

// Its gradient 2 relu(x) grad, from value = relu(x)^2: the root of a rounded square is exact.
void squared_relu_backward_bf16(const uint16_t *grad, const uint16_t *value, int64_t count,
                                uint16_t *x_grad) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float positive = std::sqrt(to_float(value[i]));
    x_grad[i] = to_bf16(2.0f * to_float(to_bf16(positive)) * to_float(grad[i]));
  }
}

// LayerNorm of the rows of x [n, h]; mean [n] and scale [n], 1 / deviation, for the backward.
void layer_norm_bf16(const uint16_t *x, const uint16_t *weight, const uint16_t *bias,
                     int64_t n, int64_t h, float epsilon, uint16_t *out, float *mean,
                     float *scale) {
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t *row = x + i * h;
    float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < h; ++j) sum += to_float(row[j]);
    const float centre = sum / h;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < h; ++j) {
      const float off = to_float(row[j]) - centre;
      squares += off * off;
    }
    // A sum that overflows must not pass for a row without deviation.
    const float inverse = squares <= FLT_MAX ? 1.0f / std::sqrt(squares / h + epsilon) : NAN;
#pragma omp simd
    for (int64_t j = 0; j < h; ++j) {
      const float unit = (to_float(row[j]) - centre) * inverse;
      out[i * h + j] = to_bf16(unit * to_float(weight[j]) + to_float(bias[j]));
    }
    mean[i] = centre;
    scale[i] = inverse;
  }
}

// Gradients of x [n, h], weight [h] and bias [h]; those of weight and bias are summed in fp32.
void layer_norm_backward_bf16(const uint16_t *grad, const uint16_t *x,
                              const uint16_t *weight, const float *mean, const float *scale,
                              int64_t n, int64_t h, uint16_t *x_grad, uint16_t *weight_grad,
                              uint16_t *bias_grad) {
  std::vector<float> sums(2 * h);
  float *of_weight = sums.data(), *of_bias = of_weight + h;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t *row = x + i * h, *change = grad + i * h;
    const float centre = mean[i], inverse = scale[i];
    float along = 0.0f, total = 0.0f;  // the change of deviation and of mean
#pragma omp simd reduction(+ : along, total)
    for (int64_t j = 0; j < h; ++j) {
      const float unit = (to_float(row[j]) - centre) * inverse, wide = to_float(change[j]);
      const float weighted = wide * to_float(weight[j]);
      along += weighted * unit;
      total += weighted;
      of_weight[j] += wide * unit;
      of_bias[j] += wide;
    }
    along /= h;
    total /= h;
#pragma omp simd
    for (int64_t j = 0; j < h; ++j) {
      const float unit = (to_float(row[j]) - centre) * inverse;
      const float weighted = to_float(change[j]) * to_float(weight[j]);
      x_grad[i * h + j] = to_bf16(inverse * (weighted - total - unit * along));
    }
  }
  for (int64_t j = 0; j < h; ++j) {
    weight_grad[j] = to_bf16(of_weight[j]);
    bias_grad[j] = to_bf16(of_bias[j]);
  }
}

// target = source, both [n0, n1, n2, n3, d] with rows of d values at any four strides.
void copy_rows_bf16(const uint16_t *source, int64_t s0, int64_t s1, int64_t s2, int64_t s3,
                    uint16_t *target, int64_t t0, int64_t t1, int64_t t2, int64_t t3,
                    int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t d) {
  for (int64_t i = 0; i < n0; ++i)
    for (int64_t j = 0; j < n1; ++j)
      for (int64_t k = 0; k < n2; ++k) {
        const uint16_t *from = source + i * s0 + j * s1 + k * s2;
        uint16_t *to = target + i * t0 + j * t1 + k * t2;
        for (int64_t l = 0; l < n3; ++l) std::memcpy(to + l * t3, from + l * s3, d * sizeof *to);
      }
}

// scores [rows, keys] in place -> softmax(scale * scores) over the keys that a row sees, else 0.
// Every `queries` rows are one head: its last row sees all keys, each row before it one key less.
void causal_softmax_bf16(uint16_t *scores, int64_t rows, int64_t queries, int64_t keys,
                         float scale) {
  std::vector<float> exponentials(2 * keys);
  float *e1 = exponentials.data(), *e2 = e1 + keys;
  for (int64_t next = 0; next < rows;) {
    const Pair pair = pair_at(next, queries, keys);
    next = pair.second + 1;
    uint16_t *row1 = scores + pair.first * keys, *row2 = scores + pair.second * keys;
    hide(row1, pair.visible, pair.width, kMinusInfinity);
    hide(row2, pair.second_visible, pair.width, kMinusInfinity);
    float maximum1 = -INFINITY, maximum2 = -INFINITY, sum1 = 0.0f, sum2 = 0.0f;
#pragma omp simd reduction(max : maximum1, maximum2)
    for (int64_t j = 0; j < pair.width; ++j) {
      const float value1 = to_float(row1[j]), value2 = to_float(row2[j]);
      maximum1 = value1 > maximum1 ? value1 : maximum1;
      maximum2 = value2 > maximum2 ? value2 : maximum2;
    }
#pragma omp simd reduction(+ : sum1, sum2)
    for (int64_t j = 0; j < pair.width; ++j) {
      e1[j] = exp_nonpositive((to_float(row1[j]) - maximum1) * scale);
      e2[j] = exp_nonpositive((to_float(row2[j]) - maximum2) * scale);
      sum1 += e1[j];
      sum2 += e2[j];
    }
    const float inverse1 = 1.0f / sum1, inverse2 = 1.0f / sum2;
#pragma omp simd
    for (int64_t j = 0; j < pair.width; ++j) {
      row1[j] = to_bf16(e1[j] * inverse1);
      row2[j] = to_bf16(e2[j] * inverse2);
    }
    std::memset(row1 + pair.visible, 0, (keys - pair.visible) * sizeof *row1);
    std::memset(row2 + pair.second_visible, 0, (keys - pair.second_visible) * sizeof *row2);
  }
}

// Of these probabilities, 0 for the keys that a row does not see: their gradient in place -> the
// gradient of the scores, which for each row sums to zero. The rounded probabilities sum to
// anything near 1, so the mean is over their sum.
void causal_softmax_backward_bf16(const uint16_t *probabilities, uint16_t *gradient,
                                  int64_t rows, int64_t queries, int64_t keys,
                                  float scale) {
  for (int64_t next = 0; next < rows;) {
    const Pair pair = pair_at(next, queries, keys);
    next = pair.second + 1;
    const uint16_t *row1 = probabilities + pair.first * keys;
    const uint16_t *row2 = probabilities + pair.second * keys;
    uint16_t *change1 = gradient + pair.first * keys, *change2 = gradient + pair.second * keys;
    hide(change1, pair.visible, pair.width, 0);
    hide(change2, pair.second_visible, pair.width, 0);
    float mean1 = 0.0f, mean2 = 0.0f, total1 = 0.0f, total2 = 0.0f;
#pragma omp simd reduction(+ : mean1, mean2, total1, total2)
    for (int64_t j = 0; j < pair.width; ++j) {
      const float share1 = to_float(row1[j]), share2 = to_float(row2[j]);
      mean1 += share1 * to_float(change1[j]);
      mean2 += share2 * to_float(change2[j]);
      total1 += share1;
      total2 += share2;
    }
    mean1 /= total1;
    mean2 /= total2;
#pragma omp simd
    for (int64_t j = 0; j < pair.width; ++j) {
      // both before either is written: they may be the same row
      const float value1 = to_float(change1[j]), value2 = to_float(change2[j]);
      change1[j] = to_bf16(to_float(row1[j]) * (value1 - mean1) * scale);
      change2[j] = to_bf16(to_float(row2[j]) * (value2 - mean2) * scale);
    }
    // not only from `width` on: 0 times a mean that is not finite is not 0
    std::memset(change1 + pair.visible, 0, (keys - pair.visible) * sizeof *change1);
    std::memset(change2 + pair.second_visible, 0, (keys - pair.second_visible) * sizeof *change2);
  }
}

// A pointer comes from Python as the number that ``Tensor.data_ptr()`` is.
template <typename T>
struct Argument {
  using Type = T;
  static T of(T value) { return value; }
};
template <typename T>
struct Argument<T *> {
  using Type = uintptr_t;
  static T *of(uintptr_t address) { return reinterpret_cast<T *>(address); }
};

template <typename... Arguments>
void define(pybind11::module_ &module, const char *name, void (*function)(Arguments...)) {
  module.def(
      name,
      [function](typename Argument<Arguments>::Type... values) {
        function(Argument<Arguments>::of(values)...);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(MODULE_NAME, module) {
  define(module, "exp_tile_bf16", &exp_tile_bf16);
  define(module, "shifted_exp_bf16", &shifted_exp_bf16);
  define(module, "transpose_bf16", &transpose_bf16);
  define(module, "rescale_add_bf16", &rescale_add_bf16);
  define(module, "scale_bf16", &scale_bf16);
  define(module, "add_bf16", &add_bf16);
  define(module, "gelu_bf16", &gelu_bf16);
  define(module, "multiply_bf16", &multiply_bf16);
  define(module, "squared_relu_bf16", &squared_relu_bf16);
  define(module, "squared_relu_backward_bf16", &squared_relu_backward_bf16);
  define(module, "layer_norm_bf16", &layer_norm_bf16);
  define(module, "layer_norm_backward_bf16", &layer_norm_backward_bf16);
  define(module, "copy_rows_bf16", &copy_rows_bf16);
  define(module, "causal_softmax_bf16", &causal_softmax_bf16);
  define(module, "causal_softmax_backward_bf16", &causal_softmax_backward_bf16);
}
