// SHA-256 (FIPS 180-4) of many parts of a buffer, sixteen side by side.
//
// A step of SHA-256 waits for the one before, so one part alone leaves most of a processor idle.
// Here every part has a lane of the 512-bit registers: a register holds the same word of sixteen
// parts. Without such registers the module says that it has one lane, and hashlib is as fast.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#ifdef __AVX512BW__
#include <immintrin.h>
#endif

namespace py = pybind11;

namespace {

constexpr int64_t kBlock = 64;   // bytes that a step of SHA-256 takes
constexpr int64_t kDigest = 32;  // bytes of a digest

#ifdef __AVX512BW__

constexpr int kLanes = 16;
using Words = __m512i;  // a word of 32 bits of every lane

// First 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The same of the square roots of the first eight.
constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

Words all(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
Words sum(Words a, Words b) { return _mm512_add_epi32(a, b); }
Words xor3(Words a, Words b, Words c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
Words choose(Words e, Words f, Words g) { return _mm512_ternarylogic_epi32(e, f, g, 0xca); }
Words majority(Words a, Words b, Words c) { return _mm512_ternarylogic_epi32(a, b, c, 0xe8); }

template <int kFirst, int kSecond, int kThird>
Words rotations(Words x) {
  return xor3(_mm512_ror_epi32(x, kFirst), _mm512_ror_epi32(x, kSecond),
              _mm512_ror_epi32(x, kThird));
}

template <int kFirst, int kSecond, int kShift>
Words rotations_and_shift(Words x) {
  return xor3(_mm512_ror_epi32(x, kFirst), _mm512_ror_epi32(x, kSecond),
              _mm512_srli_epi32(x, kShift));
}

// Adds a block of every lane to the state; `w` are its words, and is used up.
[[gnu::noinline]] void compress(Words (&state)[8], Words (&w)[16]) {
  Words v[8];  // a is v[-t mod 8] in round t, b the next one, and so on
  for (int i = 0; i < 8; ++i) v[i] = state[i];
#pragma GCC unroll 64
  for (int t = 0; t < 64; ++t) {
    if (t >= 16) {
      const Words older = sum(w[t & 15], w[(t + 9) & 15]);
      w[t & 15] = sum(sum(older, rotations_and_shift<7, 18, 3>(w[(t + 1) & 15])),
                      rotations_and_shift<17, 19, 10>(w[(t + 14) & 15]));
    }
    const Words a = v[(64 - t) & 7], b = v[(65 - t) & 7], c = v[(66 - t) & 7];
    const Words e = v[(68 - t) & 7], f = v[(69 - t) & 7], g = v[(70 - t) & 7];
    Words &d = v[(67 - t) & 7], &h = v[(71 - t) & 7];
    const Words added = sum(sum(h, sum(w[t & 15], all(kRounds[t]))),
                            sum(rotations<6, 11, 25>(e), choose(e, f, g)));
    d = sum(d, added);
    h = sum(added, sum(rotations<2, 13, 22>(a), majority(a, b, c)));
  }
  for (int i = 0; i < 8; ++i) state[i] = sum(state[i], v[i]);
}

// Reads a block of every lane, and brings the same word of all of them together.
void load(const uint8_t *first, int64_t part, Words (&w)[16]) {
  const Words swap = _mm512_broadcast_i32x4(
      _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
  Words rows[16], pairs[16], fours[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    rows[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(first + i * part), swap);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // then quarter q of fours[i + j] has words 4 q + j
    fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const Words even_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
    const Words odd_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    const Words even_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
    const Words odd_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    w[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    w[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    w[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    w[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}

// Writes the digests of `kLanes` parts that lie one after the other.
void hash_lanes(const uint8_t *first, int64_t part, uint8_t *digests) {
  Words state[8], w[16];
  for (int i = 0; i < 8; ++i) state[i] = all(kInitial[i]);
  for (int64_t at = 0; at < part; at += kBlock) {
    load(first + at, part, w);
    compress(state, w);
  }
  for (int i = 0; i < 16; ++i) w[i] = all(0);  // what is added at the end: a bit, and the length
  w[0] = all(0x80000000);
  w[14] = all(static_cast<uint32_t>(static_cast<uint64_t>(part) >> 29));
  w[15] = all(static_cast<uint32_t>(part << 3));
  compress(state, w);
  alignas(64) uint32_t words[8][kLanes];
  for (int i = 0; i < 8; ++i) _mm512_store_si512(words[i], state[i]);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 8; ++i) {
      for (int byte = 0; byte < 4; ++byte) {
        *digests++ = static_cast<uint8_t>(words[i][lane] >> (24 - 8 * byte));
      }
    }
  }
}

#else

constexpr int kLanes = 1;
void hash_lanes(const uint8_t *, int64_t, uint8_t *) { throw std::runtime_error("use hashlib"); }

#endif

}  // namespace

// Returns the digests of all parts, one after the other. The buffer must hold a multiple of
// kLanes parts, and a part a multiple of kBlock bytes. Runs without the interpreter's lock.
py::bytes digests(const py::buffer &content, int64_t part) {
  const py::buffer_info info = content.request();
  const int64_t size = info.size * info.itemsize;
  if (part <= 0 || part % kBlock || size % (kLanes * part)) {
    throw std::invalid_argument("no multiple of blocks, or of parts for all lanes");
  }
  std::string found(static_cast<size_t>(size / part * kDigest), '\0');
  {
    const py::gil_scoped_release released;
    const auto *first = static_cast<const uint8_t *>(info.ptr);
    auto *out = reinterpret_cast<uint8_t *>(&found[0]);
    for (int64_t at = 0; at < size; at += kLanes * part, out += kLanes * kDigest) {
      hash_lanes(first + at, part, out);
    }
  }
  return py::bytes(found);
}

PYBIND11_MODULE(MODULE_NAME, module) {
  module.attr("LANES") = kLanes;
  module.def("digests", &digests);
}
