// Attention of rows to the keys of lists of blocks, float32, on a CPU. See native.py.
//
// For each unit and key head, keys are taken a tile at a time, so that a tile stays in the
// processor's second cache while all rows attend to it:
//
//     keys of a tile      -> panels of 16 keys,   each D x 16, next to each other
//     values of a tile    -> panels of 16 numbers, each keys x 16
//     6 rows x 16 columns -> 12 vectors of sums, which stay in registers
//
// Few rows read keys and values where they are: copying would cost more than it gives. Softmax is
// taken online: a row's largest score so far scales what it has summed (Milakov, Gimelshein 2018).
//
// No header of torch: to compile those would take three times as long as all that is here.
#ifdef __AVX__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

namespace {

constexpr int64_t kDim = HEAD_DIM;  // a multiple of 16
constexpr int64_t kLanes = 8, kPanel = 2 * kLanes;
constexpr int64_t kRows = 6, kFew = 4;
constexpr int64_t kTile = 16384 / kDim / kPanel * kPanel;  // keys: 64 KB of them, and of values
constexpr int64_t kAhead = 8;                              // keys that are fetched in advance
constexpr float kNone = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int Ints __attribute__((vector_size(32), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float sum(Vec x) {
  return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

inline float largest(Vec x) {
  float found = x[0];
  for (int64_t i = 1; i < kLanes; ++i) found = std::max(found, x[i]);
  return found;
}

// exp(x) for x <= 0, below -87 zero: the polynomial of Cephes' expf, as in compiled.py.
inline Vec exp_of(Vec x) {
  const Vec least = Vec{} - 87.0f;
  const Vec y = larger(x, least);
  const Ints n = __builtin_convertvector(y * 1.44269504088896341f - 0.5f, Ints);
  const Vec whole = __builtin_convertvector(n, Vec);
  const Vec r = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints bits = (n + 127) << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof power);
  return x < least ? Vec{} : p * power;
}

inline void prefetch(const float* numbers) {
  for (int64_t d = 0; d < kDim; d += 16) __builtin_prefetch(numbers + d);
}

// Store 8 rows of 8 numbers as columns. In three rounds each number finds its place: within pairs,
// within halves of a vector, then between halves.
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#ifdef __AVX__
  __m256 x[8], y[8];
  for (int64_t i = 0; i < 8; ++i) x[i] = _mm256_loadu_ps(from + i * from_stride);
  for (int64_t i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int64_t i = 0; i < 8; i += 4) {
    x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xEE);
    x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xEE);
  }
  for (int64_t i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  }
#else
  for (int64_t i = 0; i < 8; ++i)
    for (int64_t j = 0; j < 8; ++j) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

// Rows of one key head, and what they have summed so far.
struct Rows {
  std::vector<float> q, scores, largest, total;
  std::vector<float*> out;
};

// A tile of keys: where they are, and their panels.
struct Tile {
  int64_t num_keys = 0;
  std::vector<const float*> k, v;
  std::vector<float> key_panels, value_panels;

  Tile() : k(kTile), v(kTile), key_panels(kTile * kDim), value_panels(kTile * kDim) {}

  void pack(int64_t stride) {
    for (int64_t j = 0; j < num_keys; j += kLanes) {
      float* to = key_panels.data() + j / kPanel * kPanel * kDim + j % kPanel;
      for (int64_t i = j + kLanes; i < std::min(j + 2 * kLanes, num_keys); ++i) prefetch(k[i]);
      const bool is_whole = j + kLanes <= num_keys;
      if (is_whole && k[j + kLanes - 1] - k[j] == (kLanes - 1) * stride) {
        for (int64_t d = 0; d < kDim; d += kLanes)
          transpose(k[j] + d, stride, to + d * kPanel, kPanel);
      } else {
        for (int64_t i = 0; i < kLanes; ++i)
          for (int64_t d = 0; d < kDim; ++d)
            to[d * kPanel + i] = j + i < num_keys ? k[j + i][d] : 0.0f;
      }
    }
    if (num_keys % kPanel && num_keys % kPanel <= kLanes) {  // the last half panel
      float* to = key_panels.data() + num_keys / kPanel * kPanel * kDim + kLanes;
      for (int64_t d = 0; d < kDim; ++d) store(to + d * kPanel, Vec{});
    }
    for (int64_t j = 0; j < num_keys; ++j) {
      if (j + kAhead < num_keys) prefetch(v[j + kAhead]);
      for (int64_t d = 0; d < kDim; d += kPanel) {
        float* to = value_panels.data() + d * kTile + j * kPanel;
        store(to, load(v[j] + d));
        store(to + kLanes, load(v[j] + d + kLanes));
      }
    }
  }
};

// Make weights of a row's scores of a tile.
void weigh(Rows& rows, int64_t row, float* scores, int64_t num_keys, float softcap) {
  if (softcap > 0)
    for (int64_t i = 0; i < num_keys; ++i) scores[i] = softcap * std::tanh(scores[i] / softcap);
  const int64_t end = (num_keys + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = num_keys; i < end; ++i) scores[i] = kNone;
  Vec top = load(scores);
  for (int64_t i = kLanes; i < end; i += kLanes) top = larger(top, load(scores + i));
  const float found = largest(top);
  if (found > rows.largest[row]) {
    if (rows.total[row] > 0) {
      const float factor = std::exp(rows.largest[row] - found);
      float* out = rows.out[row];
      for (int64_t d = 0; d < kDim; d += kLanes) store(out + d, load(out + d) * factor);
      rows.total[row] *= factor;
    }
    rows.largest[row] = found;
  }
  const Vec most = Vec{} + rows.largest[row];
  Vec total{};
  for (int64_t i = 0; i < end; i += kLanes) {
    const Vec weight = exp_of(load(scores + i) - most);
    store(scores + i, weight);
    total += weight;
  }
  rows.total[row] += sum(total);
}

// R rows of a x 16 columns of b, n products each, added to what is in `to` where kAdd.
template <int R, bool kAdd>
inline void multiply(const float* a, int64_t stride, const float* b, float* const* to, int64_t n) {
  Vec x[R], y[R];
  for (int r = 0; r < R; ++r) {
    x[r] = kAdd ? load(to[r]) : Vec{};
    y[r] = kAdd ? load(to[r] + kLanes) : Vec{};
  }
  for (int64_t i = 0; i < n; ++i) {
    const Vec first = load(b + i * kPanel), second = load(b + i * kPanel + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float factor = a[r * stride + i];
      x[r] += factor * first;
      y[r] += factor * second;
    }
  }
  for (int r = 0; r < R; ++r) {
    store(to[r], x[r]);
    store(to[r] + kLanes, y[r]);
  }
}

template <int R>
void attend_to_panels(Rows& rows, int64_t first, const Tile& tile, float softcap) {
  float* scores = rows.scores.data();
  const float* q = rows.q.data() + first * kDim;
  float* to[R];
  for (int64_t j = 0; j < tile.num_keys; j += kPanel) {
    for (int r = 0; r < R; ++r) to[r] = scores + r * kTile + j;
    multiply<R, false>(q, kDim, tile.key_panels.data() + j * kDim, to, kDim);
  }
  for (int r = 0; r < R; ++r) weigh(rows, first + r, scores + r * kTile, tile.num_keys, softcap);
  for (int64_t d = 0; d < kDim; d += kPanel) {
    for (int r = 0; r < R; ++r) to[r] = rows.out[first + r] + d;
    multiply<R, true>(scores, kTile, tile.value_panels.data() + d * kTile, to, tile.num_keys);
  }
}

template <int R>
void attend_in_place(Rows& rows, const Tile& tile, float softcap) {
  float* scores = rows.scores.data();
  const float* q = rows.q.data();
  for (int64_t j = 0; j < tile.num_keys; ++j) {
    if (j + kAhead < tile.num_keys) prefetch(tile.k[j + kAhead]);
    Vec x[R];
    for (int r = 0; r < R; ++r) x[r] = Vec{};
#pragma GCC unroll 4
    for (int64_t d = 0; d < kDim; d += kLanes) {
      const Vec k = load(tile.k[j] + d);
      for (int r = 0; r < R; ++r) x[r] += load(q + r * kDim + d) * k;
    }
    for (int r = 0; r < R; ++r) scores[r * kTile + j] = sum(x[r]);
  }
  for (int r = 0; r < R; ++r) weigh(rows, r, scores + r * kTile, tile.num_keys, softcap);
  constexpr int kVecs = R <= 3 && kDim % 32 == 0 ? 4 : 2;  // of each row at once, in registers
  for (int64_t d = 0; d < kDim; d += kVecs * kLanes) {
    Vec x[R][kVecs];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kVecs; ++c) x[r][c] = load(rows.out[r] + d + c * kLanes);
    for (int64_t j = 0; j < tile.num_keys; ++j) {
      if (j + kAhead < tile.num_keys)
        for (int c = 0; c < kVecs; c += 2) __builtin_prefetch(tile.v[j + kAhead] + d + c * kLanes);
      Vec v[kVecs];
      for (int c = 0; c < kVecs; ++c) v[c] = load(tile.v[j] + d + c * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const float weight = scores[r * kTile + j];
        for (int c = 0; c < kVecs; ++c) x[r][c] += weight * v[c];
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kVecs; ++c) store(rows.out[r] + d + c * kLanes, x[r][c]);
  }
}

void attend_to_tile(Rows& rows, int64_t num_rows, Tile& tile, int64_t stride, float softcap) {
  switch (num_rows) {
    case 1: return attend_in_place<1>(rows, tile, softcap);
    case 2: return attend_in_place<2>(rows, tile, softcap);
    case 3: return attend_in_place<3>(rows, tile, softcap);
    case 4: return attend_in_place<4>(rows, tile, softcap);
  }
  static_assert(kFew == 4 && kRows == 6);
  tile.pack(stride);
  for (int64_t row = 0; row < num_rows; row += kRows) {
    switch (std::min(kRows, num_rows - row)) {
      case 1: attend_to_panels<1>(rows, row, tile, softcap); break;
      case 2: attend_to_panels<2>(rows, row, tile, softcap); break;
      case 3: attend_to_panels<3>(rows, row, tile, softcap); break;
      case 4: attend_to_panels<4>(rows, row, tile, softcap); break;
      case 5: attend_to_panels<5>(rows, row, tile, softcap); break;
      default: attend_to_panels<6>(rows, row, tile, softcap);
    }
  }
}

// Merge the parts of one row and head into the first; a part whose lse is -inf is absent.
void merge(float* out, float* lse, int64_t num_parts, int64_t part_size) {
  float most = kNone;
  for (int64_t p = 0; p < num_parts; ++p) most = std::max(most, lse[p * part_size]);
  float sums[kDim] = {};
  float total = 0;
  for (int64_t p = 0; p < num_parts && most > kNone; ++p) {
    const float weight = std::exp(lse[p * part_size] - most);
    if (!(weight > 0)) continue;
    total += weight;
    for (int64_t d = 0; d < kDim; ++d) sums[d] += weight * out[p * part_size * kDim + d];
  }
  for (int64_t d = 0; d < kDim; ++d) out[d] = total > 0 ? sums[d] / total : 0.0f;
  lse[0] = total > 0 ? most + std::log(total) : kNone;
}

}  // namespace

// rows, blocks: of all units, one after the other. Of a unit: first row and number of rows, first
// block, first key and end of the keys in its blocks, part. out [parts, T, Hq, D] is written where
// a unit has rows; lse [parts, T, Hq] is -inf before.
extern "C" void kernel(const float* q, const float* k, const float* v, const int64_t* rows_of,
                       const int64_t* blocks_of, const int64_t* units, const float* numbers,
                       float* out, float* lse, const int64_t num_units, const int64_t num_parts,
                       const int64_t num_rows, const int64_t num_heads,
                       const int64_t num_kv_heads, const int64_t block_size,
                       const int64_t is_merged, const int64_t num_threads) {
  const float scale = numbers[0], softcap = numbers[1];
  const int64_t group = num_heads / num_kv_heads, stride = num_kv_heads * kDim;
  const int64_t part_size = num_rows * num_heads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Rows rows;
    rows.scores.resize(kRows * kTile);
    Tile tile;
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < num_units * num_kv_heads; ++job) {
      const int64_t* unit = units + job / num_kv_heads * 6;
      const int64_t head = job % num_kv_heads, n = unit[1] * group;
      const int64_t* blocks = blocks_of + unit[2];
      rows.q.resize(n * kDim);
      rows.out.resize(n);
      rows.largest.assign(n, kNone);
      rows.total.assign(n, 0.0f);
      const auto place = [&](int64_t r) {
        return rows_of[unit[0] + r / group] * num_heads + head * group + r % group;
      };
      for (int64_t r = 0; r < n; ++r) {
        const float* from = q + place(r) * kDim;
        rows.out[r] = out + (unit[5] * part_size + place(r)) * kDim;
        for (int64_t d = 0; d < kDim; ++d) rows.q[r * kDim + d] = from[d] * scale;
        std::fill_n(rows.out[r], kDim, 0.0f);
      }
      for (int64_t start = unit[3]; start < unit[4]; start += kTile) {
        tile.num_keys = std::min(kTile, unit[4] - start);
        for (int64_t j = 0; j < tile.num_keys; ++j) {
          const int64_t key = start + j;
          const int64_t slot = blocks[key / block_size] * block_size + key % block_size;
          tile.k[j] = k + slot * stride + head * kDim;
          tile.v[j] = v + slot * stride + head * kDim;
        }
        attend_to_tile(rows, n, tile, stride, softcap);
      }
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t d = 0; d < kDim; ++d) rows.out[r][d] /= rows.total[r];
        lse[unit[5] * part_size + place(r)] = rows.largest[r] + std::log(rows.total[r]);
      }
    }
    if (is_merged) {
#pragma omp for
      for (int64_t at = 0; at < part_size; ++at)
        merge(out + at * kDim, lse + at, num_parts, part_size);
    }
  }
}
