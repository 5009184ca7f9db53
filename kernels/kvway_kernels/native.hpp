// Vectors, and how keys and values are stored: the first half of native.cpp.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace {

#ifdef __AVX512DQ__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Small integers as 32 bits each. Compilers make one number at a time of the plain form.
inline Ints widened(const int8_t* p) {
#if defined(__AVX512DQ__)
  return same_bits<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return same_bits<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  Ints x;
  for (int64_t i = 0; i < kLanes; ++i) x[i] = p[i];
  return x;
#endif
}
inline Bits widened(const uint16_t* p) {
#if defined(__AVX512DQ__)
  return same_bits<Bits>(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)));
#elif defined(__AVX2__)
  return same_bits<Bits>(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  Bits x;
  for (int64_t i = 0; i < kLanes; ++i) x[i] = p[i];
  return x;
#endif
}

// Kinds of keys and values: how a number is stored, and whether it is a code times a scale. As
// float32 it is exact; so are the kinds but the first as bfloat16, the upper half of that.
struct Float32 {
  using Code = float;
  static constexpr bool kIsScaled = false;
  static Vec numbers(const Code* p) { return load(p); }
};
struct BFloat16 {
  using Code = uint16_t;
  static constexpr bool kIsScaled = false;
  static Vec numbers(const Code* p) {
    return same_bits<Vec>(widened(p) << 16);
  }
};
struct Int8 {
  using Code = int8_t;
  static constexpr bool kIsScaled = true;
  static Vec numbers(const Code* p) {
    return __builtin_convertvector(widened(p), Vec);
  }
};
struct Float8 {  // e4m3: its bits at their places in a float32, whose exponent is too small by 120
  using Code = int8_t;
  static constexpr bool kIsScaled = true;
  static Vec numbers(const Code* p) {
    const Bits bits = same_bits<Bits>(widened(p));
    return same_bits<Vec>((bits << 20) & 0x87F00000u) * 0x1p120f;
  }
};
using Kind = KV_KIND;
using Code = Kind::Code;

// Whether products are of pairs of bfloat16, summed in float32: twice as fast as float32. Queries
// lose nothing by it where they are bfloat16; weights are rounded as any bfloat16 attention does.
#ifdef __AVX512BF16__
constexpr bool kPairs = QUERIES_ARE_BFLOAT16;
#else
constexpr bool kPairs = false;
#endif

// Upper halves: numbers that are exact in bfloat16.
inline void store_upper(uint16_t* p, Vec numbers) {
#ifdef __AVX512DQ__
  const Bits upper = same_bits<Bits>(numbers) >> 16;
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(same_bits<__m512i>(upper)));
#endif
}

// x + factor * columns; of pairs: both products.
inline Vec plus_product(Vec x, float factor, Vec columns) {
#ifdef __AVX512BF16__
  if constexpr (kPairs)
    return same_bits<Vec>(_mm512_dpbf16_ps(same_bits<__m512>(x),
                                           same_bits<__m512bh>(_mm512_set1_ps(factor)),
                                           same_bits<__m512bh>(columns)));
#endif
  return x + factor * columns;
}

// Pairs of one number of each, rounded to bfloat16, the first in the lower half.
inline Vec paired(Vec first, Vec second) {
  const auto rounded = [](Vec x) {
    const Bits bits = same_bits<Bits>(x);
    return bits + 0x7FFFu + ((bits >> 16) & 1u);
  };
  return same_bits<Vec>((rounded(first) >> 16) | (rounded(second) & 0xFFFF0000u));
}

// The second where either is NaN.
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float sum(Vec x) {
#ifdef __AVX512DQ__
  return _mm512_reduce_add_ps(same_bits<__m512>(x));
#else
  return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
#endif
}

// Sums of four vectors each: pairs of numbers, then pairs of these, stand next to each other.
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
inline Four sums(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512DQ__)
  const auto w = same_bits<__m512>(a), x = same_bits<__m512>(b), y = same_bits<__m512>(c),
             z = same_bits<__m512>(d);
  const auto pairs = [](__m512 a, __m512 b) {
    return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  };
  const __m512d wx = pairs(w, x), yz = pairs(y, z);
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(wx, yz)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(wx, yz)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return same_bits<Four>(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX__)
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(same_bits<__m256>(a), same_bits<__m256>(b)),
                                      _mm256_hadd_ps(same_bits<__m256>(c), same_bits<__m256>(d)));
  return same_bits<Four>(
      _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  return Four{sum(a), sum(b), sum(c), sum(d)};
#endif
}

inline float largest_of(Vec x) {
  float found = x[0];
  for (int64_t i = 1; i < kLanes; ++i) found = std::max(found, x[i]);
  return found;
}

// exp(x) for x <= 0, far below zero; NaN stays NaN: the polynomial of Cephes' expf, as in
// compiled.py.
inline Vec exp_of(Vec x) {
#ifdef __AVX512DQ__
  x = larger(Vec{} - 110.0f, x);  // from there on scalef gives zero
  const auto n = same_bits<Vec>(_mm512_roundscale_ps(
      same_bits<__m512>(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const Vec least = Vec{} - 87.0f, given = x;
  x = larger(least, x);
  const Ints whole = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, Ints);
  const Vec n = __builtin_convertvector(whole, Vec);
#endif
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#ifdef __AVX512DQ__
  return same_bits<Vec>(_mm512_scalef_ps(same_bits<__m512>(p), same_bits<__m512>(n)));
#else
  return given < least ? Vec{} : p * same_bits<Vec>((whole + 127) << 23);
#endif
}

// One layer's keys and values: blocks, in each block_size x num_kv_heads x kDim codes, and, where
// these are scaled, block_size x num_kv_heads scales in bfloat16.
struct Cache {
  const Code *k, *v;
  const uint16_t *k_scale, *v_scale;
  int64_t k_stride, v_stride, k_scale_stride, v_scale_stride;  // from block to block, in elements
  int64_t num_kv_heads, block_size;
};

inline float scale_at(const uint16_t* scales, int64_t at) {
  const uint32_t bits = static_cast<uint32_t>(scales[at]) << 16;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

}  // namespace
