// Attention of rows to the keys of lists of blocks on a CPU. See native.py.
//
// For each unit and key head, keys are taken a tile at a time, so that a tile stays in the
// processor's second cache while all rows attend to it. How a tile is gone through depends on the
// rows (heads of one key head are rows, too):
//
//     few rows    each key is read where it is, for all rows at once
//     more rows   a tile's keys and values are laid out once as products take them (float32, or
//                 pairs of bfloat16); then, in registers,
//                     scores    kRows keys x a panel of rows, so that keys need no transposing
//                     softmax   key after key, for as many rows at once as a vector has lanes
//                     sums      kRows rows x a panel of a value's numbers
//
// Softmax is taken online: a row's largest score so far scales what it has summed (Milakov,
// Gimelshein 2018).

namespace {

#ifdef __AVX512DQ__
constexpr int64_t kRows = 12, kStep = 4;  // of a product: of 32 registers 24 are sums
#else
constexpr int64_t kRows = 6, kStep = 2;  // of 16 registers 12 are sums
#endif
constexpr int64_t kPanel = 2 * kLanes;        // columns of a product; the last may have half
constexpr int64_t kDim = HEAD_DIM;            // a multiple of 16
constexpr int64_t kPerCell = kPairs ? 2 : 1;  // numbers in 32 bits, where a product has them
constexpr int64_t kCells = kDim / kPerCell;
constexpr int64_t kFew = 4;    // rows that are no more than this read keys in place
constexpr int64_t kBand = 96;  // rows whose scores are kept at once
constexpr int64_t kTile = std::clamp<int64_t>(16384 / kDim / 16 * 16, 16, 128);  // keys
constexpr int64_t kAhead = 8;   // keys that are fetched in advance
constexpr int64_t kAtOnce = 4;  // keys that few rows read at once
constexpr float kNone = -std::numeric_limits<float>::infinity();

constexpr int64_t up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

inline void fetch(const Code* numbers) {
  for (size_t d = 0; d < kDim; d += 64 / sizeof(Code)) __builtin_prefetch(numbers + d);
}

// What a thread keeps beside queries and sums of a unit's rows, however many keys there are.
static_assert(4 * ((up(kTile, kRows) + kTile) * kDim + up(kTile, kRows) * kBand) <= 1 << 18);

// A tile of keys: where they are, and, where there are rows enough, as a product takes them.
struct Tile {
  int64_t num_keys = 0;
  const Code *k[kTile], *v[kTile];
  float k_scale[up(kTile, kRows)];  // factors on scores
  float v_scale[kTile];             // factors on weights, where numbers are scaled
  std::vector<float> keys, values;  // keys x kCells; panels of cells of values, each kPanel wide

  explicit Tile(float scale) : keys(up(kTile, kRows) * kCells), values(kTile * kCells) {
    std::fill_n(k_scale, up(kTile, kRows), scale);
  }

  void find(const Cache& cache, const int64_t* blocks, int64_t start, int64_t end, int64_t head,
            float scale) {
    num_keys = end - start;
    int64_t block = start / cache.block_size, offset = start % cache.block_size;
    for (int64_t j = 0; j < num_keys; ++j) {
      const int64_t place = offset * cache.num_kv_heads + head;
      k[j] = cache.k + blocks[block] * cache.k_stride + place * kDim;
      v[j] = cache.v + blocks[block] * cache.v_stride + place * kDim;
      if constexpr (Kind::kIsScaled) {
        k_scale[j] = scale * scale_at(cache.k_scale, blocks[block] * cache.k_scale_stride + place);
        v_scale[j] = scale_at(cache.v_scale, blocks[block] * cache.v_scale_stride + place);
      }
      if (++offset == cache.block_size) offset = 0, ++block;
    }
    for (int64_t j = num_keys; j < up(num_keys, kAtOnce); ++j) k[j] = k[num_keys - 1];
  }

  void lay_out() {
    for (int64_t j = 0; j < num_keys; ++j) {
      if (j + kAhead < num_keys) fetch(k[j + kAhead]), fetch(v[j + kAhead]);
      float* key = keys.data() + j * kCells;
      for (int64_t d = 0; d < kDim; d += kLanes) {
        if constexpr (kPairs)
          store_upper(reinterpret_cast<uint16_t*>(key) + d, Kind::numbers(k[j] + d));
        else
          store(key + d, Kind::numbers(k[j] + d));
      }
      if (j % kPerCell) continue;
      for (int64_t d = 0; d < kDim; d += kLanes) {
        const int64_t panel = d / kPanel * kPanel, width = std::min(kPanel, kDim - panel);
        Vec cells = Kind::numbers(v[j] + d);
        if constexpr (kPairs)
          cells = paired(cells, j + 1 < num_keys ? Kind::numbers(v[j + 1] + d) : Vec{});
        store(values.data() + panel * kTile / kPerCell + j / kPerCell * width + d - panel, cells);
      }
    }
  }
};

// Rows of one unit and key head, and what they have summed so far. Behind the last row are zeros.
struct Rows {
  int64_t num = 0;
  std::vector<float> q;               // few rows: rows x kDim; else panels, each kCells x kPanel
  std::vector<float> out;             // rows x kDim
  std::vector<float> largest, total;  // of each row
  std::vector<float> scores;          // few rows: rows x kTile; else kTile x kBand

  Rows() : scores(std::max(up(kTile, kRows) * kBand, kFew * kTile)) {}

  bool are_few() const { return num <= kFew; }

  void reset(int64_t num_rows) {
    num = num_rows;
    const int64_t padded = up(num, kLanes);
    q.assign(padded * kDim, 0.0f);
    out.assign(padded * kDim, 0.0f);
    largest.assign(padded, kNone);
    total.assign(padded, 0.0f);
  }

  void put(int64_t row, const float* numbers) {
    if (are_few()) {
      std::copy_n(numbers, kDim, q.data() + row * kDim);
      return;
    }
    const int64_t panel = row / kPanel * kPanel;
    const int64_t width = std::min(kPanel, up(num, kLanes) - panel);
    float* cells = q.data() + panel * kCells + row - panel;
    for (int64_t d = 0; d < kDim; d += kPerCell) {
      float* cell = cells + d / kPerCell * width;
      if constexpr (kPairs)
        *cell = same_bits<float>(same_bits<uint32_t>(numbers[d]) >> 16 |
                                 (same_bits<uint32_t>(numbers[d + 1]) & 0xFFFF0000u));
      else
        *cell = numbers[d];
    }
  }
};

inline void scale_row(float* out, float factor) {
  for (int64_t d = 0; d < kDim; d += kLanes) store(out + d, load(out + d) * factor);
}

inline void cap(float* scores, int64_t n, float softcap) {
  for (int64_t i = 0; i < n; ++i) scores[i] = softcap * std::tanh(scores[i] / softcap);
}

// Make weights of one row's scores, which follow each other.
void weigh_row(Rows& rows, int64_t row, float* scores, int64_t num_keys) {
  const int64_t end = up(num_keys, kLanes);
  for (int64_t i = num_keys; i < end; ++i) scores[i] = kNone;
  Vec top = load(scores);
  for (int64_t i = kLanes; i < end; i += kLanes) top = larger(top, load(scores + i));
  const float found = largest_of(top);
  if (found > rows.largest[row]) {
    const float factor = std::exp(rows.largest[row] - found);
    scale_row(rows.out.data() + row * kDim, factor);
    rows.total[row] *= factor;
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

// Make weights of the scores of as many rows as a vector has lanes; a key's follow each other.
// Pairs of keys have theirs in one cell.
void weigh_lanes(Rows& rows, int64_t first, float* scores, const Tile& tile) {
  const int64_t num_keys = tile.num_keys;
  const Vec before = load(rows.largest.data() + first);
  Vec most = before;
  for (int64_t j = 0; j < num_keys; ++j) most = larger(most, load(scores + j * kBand));
  Vec total{};
  const auto weight = [&](int64_t j) {
    const Vec found = exp_of(load(scores + j * kBand) - most);
    total += found;
    return Kind::kIsScaled ? found * tile.v_scale[j] : found;
  };
  for (int64_t j = 0; j < num_keys; j += kPerCell) {
    Vec cells = weight(j);
    if constexpr (kPairs) cells = paired(cells, j + 1 < num_keys ? weight(j + 1) : Vec{});
    store(scores + j / kPerCell * kBand, cells);
  }
  const Vec factor = exp_of(before - most);
  for (int64_t i = 0; i < kLanes; ++i)
    if (factor[i] != 1.0f) scale_row(rows.out.data() + (first + i) * kDim, factor[i]);
  float* sums = rows.total.data() + first;
  store(sums, load(sums) * factor + total);
  store(rows.largest.data() + first, most);
}

// R rows of a times V vectors of columns of b, n cells each: onto R rows of `to`, or, where there
// are factors, in place of them, times a factor each.
template <int R, int V>
inline void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, float* to,
                     int64_t to_row, int64_t n, const float* factors = nullptr) {
  Vec x[R][V];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < V; ++c) x[r][c] = factors ? Vec{} : load(to + r * to_row + c * kLanes);
  for (int64_t i = 0; i < n; ++i) {
    Vec columns[V];
    for (int c = 0; c < V; ++c) columns[c] = load(b + (i * V + c) * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const float factor = a[r * a_row + i * a_step];
      for (int c = 0; c < V; ++c) x[r][c] = plus_product(x[r][c], factor, columns[c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < V; ++c)
      store(to + r * to_row + c * kLanes, factors ? x[r][c] * factors[r] : x[r][c]);
}

template <int V>
void scores_of_panel(Rows& rows, int64_t first, int64_t panel, const Tile& tile) {
  for (int64_t j = 0; j < tile.num_keys; j += kRows)
    multiply<kRows, V>(tile.keys.data() + j * kCells, kCells, 1,
                       rows.q.data() + (first + panel) * kCells,
                       rows.scores.data() + j * kBand + panel, kBand, kCells, tile.k_scale + j);
}

template <int V>
void add_values(Rows& rows, int64_t first, int64_t num, int64_t d, const Tile& tile) {
  for (int64_t r = 0; r < num; r += kRows) {
    const auto add = [&](auto size) {
      multiply<size.value, V>(rows.scores.data() + r, 1, kBand,
                              tile.values.data() + d * kTile / kPerCell,
                              rows.out.data() + (first + r) * kDim + d, kDim,
                              up(tile.num_keys, kPerCell) / kPerCell);
    };
    const int64_t size = up(std::min(kRows, num - r), kStep);
    static_assert(kRows == 3 * kStep);
    if (size == kRows) add(std::integral_constant<int, kRows>{});
    else if (size == kStep) add(std::integral_constant<int, kStep>{});
    else add(std::integral_constant<int, 2 * kStep>{});
  }
}

void attend_to_laid_out(Rows& rows, const Tile& tile, float softcap) {
  for (int64_t first = 0; first < rows.num; first += kBand) {
    const int64_t num = std::min(kBand, rows.num - first), padded = up(num, kLanes);
    for (int64_t panel = 0; panel < padded; panel += kPanel) {
      if (padded - panel >= kPanel) scores_of_panel<2>(rows, first, panel, tile);
      else scores_of_panel<1>(rows, first, panel, tile);
    }
    float* scores = rows.scores.data();
    if (softcap > 0)
      for (int64_t j = 0; j < tile.num_keys; ++j) cap(scores + j * kBand, num, softcap);
    for (int64_t r = 0; r < padded; r += kLanes)
      weigh_lanes(rows, first + r, scores + r, tile);
    for (int64_t d = 0; d < kDim; d += kPanel) {
      if (kDim - d >= kPanel) add_values<2>(rows, first, num, d, tile);
      else add_values<1>(rows, first, num, d, tile);
    }
  }
}

template <int R>
void attend_in_place(Rows& rows, const Tile& tile, float softcap) {
  float* scores = rows.scores.data();
  for (int64_t j = 0; j < tile.num_keys; j += kAtOnce) {
    for (int64_t i = j + kAhead; i < std::min(j + kAhead + kAtOnce, tile.num_keys); ++i)
      fetch(tile.k[i]);
    Vec x[R][kAtOnce];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kAtOnce; ++i) x[r][i] = Vec{};
#pragma GCC unroll 4
    for (int64_t d = 0; d < kDim; d += kLanes) {
      Vec k[kAtOnce];
      for (int i = 0; i < kAtOnce; ++i) k[i] = Kind::numbers(tile.k[j + i] + d);
      for (int r = 0; r < R; ++r) {
        const Vec q = load(rows.q.data() + r * kDim + d);
        for (int i = 0; i < kAtOnce; ++i) x[r][i] += q * k[i];
      }
    }
    Four scale;
    std::memcpy(&scale, tile.k_scale + j, sizeof scale);
    for (int r = 0; r < R; ++r) {
      const Four found = sums(x[r][0], x[r][1], x[r][2], x[r][3]) * scale;
      std::memcpy(scores + r * kTile + j, &found, sizeof found);
    }
  }
  for (int r = 0; r < R; ++r) {
    float* own = scores + r * kTile;
    if (softcap > 0) cap(own, tile.num_keys, softcap);
    weigh_row(rows, r, own, tile.num_keys);
    if constexpr (Kind::kIsScaled)
      for (int64_t j = 0; j < tile.num_keys; ++j) own[j] *= tile.v_scale[j];
  }
  constexpr int kVecs = R <= 3 && kDim % (4 * kLanes) == 0 ? 4 : kDim % kPanel == 0 ? 2 : 1;
  for (int64_t d = 0; d < kDim; d += kVecs * kLanes) {  // so much of each row is in registers
    Vec x[R][kVecs];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kVecs; ++c) x[r][c] = load(rows.out.data() + r * kDim + d + c * kLanes);
    for (int64_t j = 0; j < tile.num_keys; ++j) {
      if (d == 0 && j + kAhead < tile.num_keys) fetch(tile.v[j + kAhead]);
      Vec v[kVecs];
      for (int c = 0; c < kVecs; ++c) v[c] = Kind::numbers(tile.v[j] + d + c * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const float weight = scores[r * kTile + j];
        for (int c = 0; c < kVecs; ++c) x[r][c] += weight * v[c];
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kVecs; ++c) store(rows.out.data() + r * kDim + d + c * kLanes, x[r][c]);
  }
}

void attend_to_tile(Rows& rows, Tile& tile, float softcap) {
  static_assert(kFew == 4);
  switch (rows.num) {
    case 1: return attend_in_place<1>(rows, tile, softcap);
    case 2: return attend_in_place<2>(rows, tile, softcap);
    case 3: return attend_in_place<3>(rows, tile, softcap);
    case 4: return attend_in_place<4>(rows, tile, softcap);
  }
  tile.lay_out();
  attend_to_laid_out(rows, tile, softcap);
}

// Merge the parts of one row and head into the first; one whose lse is -inf is absent, NaN stays.
void merge(float* out, float* lse, int64_t num_parts, int64_t part_size) {
  float most = kNone;
  for (int64_t p = 0; p < num_parts; ++p) most = std::max(most, lse[p * part_size]);
  float sums[kDim] = {};
  float total = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    const float weight = lse[p * part_size] == kNone ? 0 : std::exp(lse[p * part_size] - most);
    if (weight == 0) continue;
    total += weight;
    for (int64_t d = 0; d < kDim; ++d) sums[d] += weight * out[p * part_size * kDim + d];
  }
  for (int64_t d = 0; d < kDim; ++d) out[d] = total == 0 ? 0.0f : sums[d] / total;
  lse[0] = total == 0 ? kNone : most + std::log(total);
}

}  // namespace

// rows, blocks: of all units, one after the other. Of a unit: first row and number of rows, first
// block, first key and end of the keys in its blocks, part. out [parts, T, Hq, D] is written where
// a unit has rows; lse [parts, T, Hq] is -inf before. Strides are those of Cache. Python's other
// threads run meanwhile.
extern "C" void kernel(const float* q, const void* k, const void* v, const void* k_scale,
                       const void* v_scale, const int64_t* rows_of, const int64_t* blocks_of,
                       const int64_t* units, float* out, float* lse, const float scale,
                       const float softcap, const int64_t k_stride, const int64_t v_stride,
                       const int64_t k_scale_stride, const int64_t v_scale_stride,
                       const int64_t num_units, const int64_t num_parts, const int64_t num_rows,
                       const int64_t num_heads, const int64_t num_kv_heads,
                       const int64_t block_size, const int64_t is_merged,
                       const int64_t num_threads) {
  const Cache cache{static_cast<const Code*>(k),
                    static_cast<const Code*>(v),
                    static_cast<const uint16_t*>(k_scale),
                    static_cast<const uint16_t*>(v_scale),
                    k_stride,
                    v_stride,
                    k_scale_stride,
                    v_scale_stride,
                    num_kv_heads,
                    block_size};
  const int64_t group = num_heads / num_kv_heads, part_size = num_rows * num_heads;
  PyThreadState* state = PyEval_SaveThread();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Rows rows;
    Tile tile(scale);
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < num_units * num_kv_heads; ++job) {
      const int64_t* unit = units + job / num_kv_heads * 6;
      const int64_t head = job % num_kv_heads;
      const auto place = [&](int64_t r) {
        return rows_of[unit[0] + r / group] * num_heads + head * group + r % group;
      };
      rows.reset(unit[1] * group);
      for (int64_t r = 0; r < rows.num; ++r) rows.put(r, q + place(r) * kDim);
      for (int64_t start = unit[3]; start < unit[4]; start += kTile) {
        const int64_t end = std::min(start + kTile, unit[4]);
        tile.find(cache, blocks_of + unit[2], start, end, head, scale);
        attend_to_tile(rows, tile, softcap);
      }
      for (int64_t r = 0; r < rows.num; ++r) {
        const int64_t at = unit[5] * part_size + place(r);
        const float factor = 1.0f / rows.total[r];
        for (int64_t d = 0; d < kDim; d += kLanes)
          store(out + at * kDim + d, load(rows.out.data() + r * kDim + d) * factor);
        lse[at] = rows.largest[r] + std::log(rows.total[r]);
      }
    }
    if (is_merged) {
#pragma omp for
      for (int64_t at = 0; at < part_size; ++at)
        merge(out + at * kDim, lse + at, num_parts, part_size);
    }
  }
  PyEval_RestoreThread(state);
}
