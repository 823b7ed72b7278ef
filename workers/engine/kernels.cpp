// The engine's arithmetic on the CPU, float32, behind a plain C interface (native.py holds the Python side).
//
// Contract: every output row is a function of its own inputs alone, to the bit. Each output element is one chain of
// fused multiply-adds in a fixed order, whatever the number of rows, the block it falls into, the thread that computes
// it, or the width of the machine's vectors: F16 has sixteen lanes everywhere and the same reduction tree.
// Callers guarantee: sizes named k, hidden, head_dim, inner are multiples of 16; buffers do not overlap unless said.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int PANEL = 32;         // output features per packed panel of a weight
constexpr int BLOCK_TOKENS = 16;  // positions per KV block, see kv_blocks.py
constexpr int MAX_RANK = 512;
constexpr int AHEAD = 512;        // floats by which streams of weights are fetched ahead

// ---------------------------------------------------------------- sixteen lanes

#if defined(__AVX512F__)
struct F16 { __m512 v; };
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 all(float x) { return {_mm512_set1_ps(x)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 larger(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }   // b if either is NaN
inline F16 smaller(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }  // b if either is NaN
inline F16 rounded(F16 a) { return {_mm512_roundscale_ps(a.v, 0x08)}; }
inline F16 power_of_two(F16 n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
constexpr int GEMM_ROWS = 12, GEMM_WIDE = 2, HEADS_AT_ONCE = 4, VECTORS_AT_ONCE = 4;
#elif defined(__AVX2__) && defined(__FMA__)
struct F16 { __m256 lo, hi; };
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
inline F16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 larger(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 smaller(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 rounded(F16 a) { return {_mm256_round_ps(a.lo, 0x08), _mm256_round_ps(a.hi, 0x08)}; }
inline __m256 power_of_two_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F16 power_of_two(F16 n) { return {power_of_two_half(n.lo), power_of_two_half(n.hi)}; }
constexpr int GEMM_ROWS = 6, GEMM_WIDE = 1, HEADS_AT_ONCE = 3, VECTORS_AT_ONCE = 2;
#else
struct F16 { float v[LANES]; };
#define EACH_LANE for (int l = 0; l < LANES; l++)
inline F16 load(const float* p) { F16 r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F16 all(float x) { F16 r; EACH_LANE r.v[l] = x; return r; }
inline F16 fma(F16 a, F16 b, F16 c) { F16 r; EACH_LANE r.v[l] = __builtin_fmaf(a.v[l], b.v[l], c.v[l]); return r; }
inline F16 operator+(F16 a, F16 b) { F16 r; EACH_LANE r.v[l] = a.v[l] + b.v[l]; return r; }
inline F16 operator-(F16 a, F16 b) { F16 r; EACH_LANE r.v[l] = a.v[l] - b.v[l]; return r; }
inline F16 operator*(F16 a, F16 b) { F16 r; EACH_LANE r.v[l] = a.v[l] * b.v[l]; return r; }
inline F16 operator/(F16 a, F16 b) { F16 r; EACH_LANE r.v[l] = a.v[l] / b.v[l]; return r; }
inline F16 larger(F16 a, F16 b) { F16 r; EACH_LANE r.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l]; return r; }
inline F16 smaller(F16 a, F16 b) { F16 r; EACH_LANE r.v[l] = a.v[l] < b.v[l] ? a.v[l] : b.v[l]; return r; }
inline F16 rounded(F16 a) { F16 r; EACH_LANE r.v[l] = std::nearbyintf(a.v[l]); return r; }
inline F16 power_of_two(F16 n) {
  F16 r;
  EACH_LANE {
    int32_t bits = n.v[l] == n.v[l] ? (static_cast<int32_t>(n.v[l]) + 127) << 23 : 0;
    std::memcpy(&r.v[l], &bits, 4);
  }
  return r;
}
constexpr int GEMM_ROWS = 4, GEMM_WIDE = 1, HEADS_AT_ONCE = 2, VECTORS_AT_ONCE = 2;
#endif

inline void prefetch(const float* p) { __builtin_prefetch(p); }

inline float sum(F16 a) {
  float v[LANES];
  store(v, a);
  for (int width = LANES / 2; width; width /= 2)
    for (int l = 0; l < width; l++) v[l] += v[l + width];
  return v[0];
}

inline float largest(F16 a) {
  float v[LANES];
  store(v, a);
  for (int width = LANES / 2; width; width /= 2)
    for (int l = 0; l < width; l++) v[l] = v[l] > v[l + width] ? v[l] : v[l + width];
  return v[0];
}

// e^x to about 1 ulp for x in [-87, 88], clamped outside; NaN stays NaN.
inline F16 exponential(F16 x) {
  x = smaller(all(88.0f), larger(all(-87.0f), x));
  const F16 n = rounded(x * all(1.44269504f));
  F16 r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  F16 p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r) + all(1.0f);
  return p * power_of_two(n);
}

// ---------------------------------------------------------------- threads

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Runs tasks 0..count-1 on the caller and whichever helpers are awake; who takes which never matters to the result.
//
// One word holds a round's task count and the next task, so that taking a task and knowing its round are one step. A
// round ends when its tasks have: a helper that sleeps or is not scheduled holds nobody up.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
  }

  ~Pool() {
    stop_.store(true);
    wake();
    for (auto& helper : helpers_) helper.join();
  }

  template <typename Task>
  void run(int count, const Task& task) {
    if (helpers_.empty() || count <= 1) {
      for (int i = 0; i < count; i++) task(i);
      return;
    }
    call_ = [](const void* t, int i) { (*static_cast<const Task*>(t))(i); };
    task_ = &task;
    done_.store(0);
    word_.store(uint64_t(count) << 32);
    if (sleepers_.load()) wake();
    take();
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++)
      if (spins < SPINS) pause(); else std::this_thread::yield();
  }

 private:
  static constexpr int SPINS = 4000;  // tens of microseconds: more than the gap between two kernels of a step

  bool work() const {
    const uint64_t word = word_.load();
    return uint32_t(word) < word >> 32;
  }

  void take() {
    for (;;) {
      const uint64_t word = word_.fetch_add(1);
      if (uint32_t(word) >= word >> 32) return;
      call_(task_, int(uint32_t(word)));
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void help() {
    while (!stop_.load()) {
      for (int spins = 0; !work() && spins < SPINS; spins++) pause();
      if (!work()) {
        std::unique_lock<std::mutex> hold(lock_);
        sleepers_.fetch_add(1);
        wake_.wait(hold, [this] { return work() || stop_.load(); });
        sleepers_.fetch_sub(1);
      }
      if (work()) take();
    }
  }

  void wake() {
    { std::lock_guard<std::mutex> hold(lock_); }
    wake_.notify_all();
  }

  std::vector<std::thread> helpers_;
  std::mutex lock_;
  std::condition_variable wake_;
  std::atomic<uint64_t> word_{0};  // tasks of the round << 32 | next task
  std::atomic<int> done_{0}, sleepers_{0};
  std::atomic<bool> stop_{false};
  void (*call_)(const void*, int) = nullptr;
  const void* task_ = nullptr;
};

std::unique_ptr<Pool> pool;

// ---------------------------------------------------------------- matrix product

// y[r][c] = sum over i of w[i][c] * x[i][r], i ascending: WIDE vectors of one panel against ROWS packed rows.
template <int ROWS, int WIDE>
void multiply(const float* w, const float* x, int k, float* y, int64_t y_stride) {
  F16 acc[ROWS][WIDE];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < WIDE; c++) acc[r][c] = all(0.0f);
  for (int i = 0; i < k; i++, w += PANEL, x += ROWS) {
    F16 wide[WIDE];
    for (int c = 0; c < WIDE; c++) wide[c] = load(w + c * LANES);
    for (int c = 0; c < WIDE; c++) prefetch(w + AHEAD + c * LANES);
    for (int r = 0; r < ROWS; r++) {
      const F16 value = all(x[r]);
      for (int c = 0; c < WIDE; c++) acc[r][c] = fma(wide[c], value, acc[r][c]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < WIDE; c++) store(y + r * y_stride + c * LANES, acc[r][c]);
}

template <int ROWS>
void multiply_panel(int rows, const float* w, const float* x, int k, float* y, int64_t y_stride) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_panel<ROWS - 1>(rows, w, x, k, y, y_stride);
  for (int c = 0; c < PANEL / LANES; c += GEMM_WIDE)
    multiply<ROWS, GEMM_WIDE>(w + c * LANES, x, k, y + c * LANES, y_stride);
}

}  // namespace

extern "C" {

// Threads of every later call. Call it before anything else, never while another call runs.
void engine_threads(int threads) { pool = std::make_unique<Pool>(threads); }

// Puts w [d, k] at features first.. of packed [ceil(all features / 32)][k][32], which began as zeros.
void engine_pack(const float* w, int d, int k, float* packed, int first) {
  const int from = first / PANEL, until = (first + d + PANEL - 1) / PANEL;
  pool->run(until - from, [=](int task) {
    const int panel = from + task;
    const int low = std::max(first, panel * PANEL), high = std::min(first + d, (panel + 1) * PANEL);
    float* out = packed + int64_t(panel) * k * PANEL + low % PANEL;
    const float* in = w + int64_t(low - first) * k;
    for (int i = 0; i < k; i++, in++, out += PANEL)
      for (int j = 0; j < high - low; j++) out[j] = in[int64_t(j) * k];
  });
}

// out[row] = row ids[row] of the weight that was packed [d, k].
void engine_embed(const float* packed, int k, const int32_t* ids, int n, float* out) {
  pool->run(n, [=](int row) {
    const float* from = packed + int64_t(ids[row] / PANEL) * k * PANEL + ids[row] % PANEL;
    for (int i = 0; i < k; i++) out[int64_t(row) * k + i] = from[int64_t(i) * PANEL];
  });
}

// y [n, d] = x [n, k] times the transposed weight. scratch holds n * k floats.
void engine_linear(const float* packed, int d, int k, const float* x, int n, float* y, float* scratch) {
  const int blocks = (n + GEMM_ROWS - 1) / GEMM_ROWS;
  const auto first = [=](int block) { return int(int64_t(n) * block / blocks); };
  pool->run(blocks, [=](int block) {
    const int from = first(block), rows = first(block + 1) - from;
    float* out = scratch + int64_t(from) * k;
    for (int i = 0; i < k; i++)
      for (int r = 0; r < rows; r++) out[int64_t(i) * rows + r] = x[int64_t(from + r) * k + i];
  });
  const int panels = (d + PANEL - 1) / PANEL;
  const int together = std::max(1, std::min(8, panels / 16));
  pool->run((panels + together - 1) / together, [=](int task) {
    for (int panel = task * together; panel < std::min(panels, (task + 1) * together); panel++) {
      const float* w = packed + int64_t(panel) * k * PANEL;
      const int width = std::min(PANEL, d - panel * PANEL);
      for (int block = 0; block < blocks; block++) {
        const int from = first(block), rows = first(block + 1) - from;
        float* out = y + int64_t(from) * d + panel * PANEL;
        const float* in = scratch + int64_t(from) * k;
        if (width == PANEL) {
          multiply_panel<GEMM_ROWS>(rows, w, in, k, out, d);
        } else {
          float edge[GEMM_ROWS * PANEL];
          multiply_panel<GEMM_ROWS>(rows, w, in, k, edge, PANEL);
          for (int r = 0; r < rows; r++) std::memcpy(out + int64_t(r) * d, edge + r * PANEL, width * sizeof(float));
        }
      }
    }
  });
}

// x += add (if given); out = x / rms(x) * gain. All [n, hidden].
void engine_norm(float* x, const float* add, const float* gain, float eps, int n, int hidden, float* out) {
  pool->run(n, [=](int row) {
    float* in = x + int64_t(row) * hidden;
    F16 squares = all(0.0f);
    for (int i = 0; i < hidden; i += LANES) {
      F16 value = load(in + i);
      if (add) {
        value = value + load(add + int64_t(row) * hidden + i);
        store(in + i, value);
      }
      squares = fma(value, value, squares);
    }
    const F16 factor = all(1.0f / std::sqrt(sum(squares) / float(hidden) + eps));
    for (int i = 0; i < hidden; i += LANES)
      store(out + int64_t(row) * hidden + i, load(in + i) * factor * load(gain + i));
  });
}

// One adapted matrix of one layer: floats from a slot's start to A [r, k], B [r, d] (rank-major) and its scale, and
// from a row of y to its d outputs.
struct Adapted {
  int64_t a, b, scale;
  int32_t d, y;
};

}  // extern "C"

namespace {

// One matrix for ROWS rows of one slot, which share every read of A and B. Each dot product has four partial sums
// (vectors i mod 4), each output adds its rank-one terms in ascending order: the same for every ROWS.
template <int ROWS>
void adapt(const Adapted& m, const float* slot, int k, int rank, const float* const* x, float* const* y) {
  constexpr int PARTS = 4;
  float low[ROWS][MAX_RANK];
  const float* a = slot + m.a;
  const float scale = slot[m.scale];
  for (int j = 0; j < rank; j++, a += k) {
    F16 acc[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PARTS; p++) acc[r][p] = all(0.0f);
    int i = 0;
    for (; i + PARTS * LANES <= k; i += PARTS * LANES)
      for (int p = 0; p < PARTS; p++) {
        const F16 wide = load(a + i + p * LANES);
        prefetch(a + i + p * LANES + AHEAD);
        for (int r = 0; r < ROWS; r++) acc[r][p] = fma(wide, load(x[r] + i + p * LANES), acc[r][p]);
      }
    for (int p = 0; i < k; i += LANES, p++) {
      const F16 wide = load(a + i);
      for (int r = 0; r < ROWS; r++) acc[r][p] = fma(wide, load(x[r] + i), acc[r][p]);
    }
    for (int r = 0; r < ROWS; r++) low[r][j] = scale * sum((acc[r][0] + acc[r][1]) + (acc[r][2] + acc[r][3]));
  }
  const float* b = slot + m.b;
  int j = 0;
  for (; j + 2 <= rank; j += 2, b += 2 * m.d)
    for (int c = 0; c < m.d; c += LANES) {
      const F16 first = load(b + c), second = load(b + m.d + c);
      prefetch(b + c + AHEAD);
      prefetch(b + m.d + c + AHEAD);
      for (int r = 0; r < ROWS; r++)
        store(y[r] + c, fma(all(low[r][j + 1]), second, fma(all(low[r][j]), first, load(y[r] + c))));
    }
  for (; j < rank; j++, b += m.d)
    for (int c = 0; c < m.d; c += LANES) {
      const F16 wide = load(b + c);
      for (int r = 0; r < ROWS; r++) store(y[r] + c, fma(all(low[r][j]), wide, load(y[r] + c)));
    }
}

template <int ROWS>
void adapt_some(int rows, const Adapted& m, const float* slot, int k, int rank, const float* const* x,
                float* const* y) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return adapt_some<ROWS - 1>(rows, m, slot, k, rank, x, y);
  adapt<ROWS>(m, slot, k, rank, x, y);
}

}  // namespace

extern "C" {

// y[row] += scale * B (A x[row]) with the row's slot, for each matrix; slot 0 and scale 0 add nothing.
// `order` lists the rows with those of one slot together.
void engine_lora(const float* x, int n, int k, const int32_t* slots, const int32_t* order, const float* stack,
                 int64_t slot_floats, int rank, const Adapted* matrices, int count, float* y, int64_t y_stride) {
  constexpr int TOGETHER = 4;
  std::vector<int> groups;  // starts in `order`, and the end of the last
  for (int i = 0; i < n; i++)
    if (i == 0 || slots[order[i]] != slots[order[i - 1]] || i - groups.back() == TOGETHER) groups.push_back(i);
  groups.push_back(n);
  pool->run((int(groups.size()) - 1) * count, [&](int task) {
    const int from = groups[task / count], rows = groups[task / count + 1] - from;
    const int slot = slots[order[from]];
    if (slot == 0) return;
    const Adapted& m = matrices[task % count];
    const float* weights = stack + int64_t(slot - 1) * slot_floats;
    if (weights[m.scale] == 0.0f) return;
    const float* in[TOGETHER];
    float* out[TOGETHER];
    for (int r = 0; r < rows; r++) {
      in[r] = x + int64_t(order[from + r]) * k;
      out[r] = y + int64_t(order[from + r]) * y_stride + m.y;
    }
    adapt_some<TOGETHER>(rows, m, weights, k, rank, in, out);
  });
}

// The shape of attention in one layer. A qkv row is q [heads, head_dim], k [kv_heads, head_dim], v likewise. Row i of a
// batch stands at positions[i] of the sequence whose block numbers are tables[tables_of[i] * table_length ...].
struct Attention {
  int32_t heads, kv_heads, head_dim, table_length;
  const int32_t* positions;
  const int32_t* tables_of;
  const int32_t* tables;
  const float* cosine;  // [context, head_dim / 2]
  const float* sine;
  float* keys;    // [blocks, kv_heads, head_dim, 16]: sixteen positions side by side
  float* values;  // [blocks, kv_heads, 16, head_dim]
};

}  // extern "C"

namespace {

inline void rotate(float* __restrict left, float* __restrict right, const float* __restrict cosine,
                   const float* __restrict sine, int half) {
  for (int i = 0; i < half; i++) {
    const float l = left[i], r = right[i];
    left[i] = __builtin_fmaf(l, cosine[i], -(r * sine[i]));
    right[i] = __builtin_fmaf(r, cosine[i], l * sine[i]);
  }
}

}  // namespace

extern "C" {

// Rotates q in place, and stores rotated k and v at their positions.
void engine_rope_store(float* qkv, int n, const Attention* about) {
  const Attention a = *about;
  const int width = a.head_dim, half = width / 2;
  pool->run(n, [=](int row) {
    const int position = a.positions[row];
    const int64_t block = a.tables[int64_t(a.tables_of[row]) * a.table_length + position / BLOCK_TOKENS];
    const int at = position % BLOCK_TOKENS;
    const float* cosine = a.cosine + int64_t(position) * half;
    const float* sine = a.sine + int64_t(position) * half;
    float* head = qkv + int64_t(row) * (a.heads + 2 * a.kv_heads) * width;
    for (int h = 0; h < a.heads + a.kv_heads; h++, head += width)
      rotate(head, head + half, cosine, sine, half);
    head -= int64_t(a.kv_heads) * width;
    for (int h = 0; h < a.kv_heads; h++) {
      float* key = a.keys + (block * a.kv_heads + h) * width * BLOCK_TOKENS + at;
      for (int i = 0; i < width; i++) key[i * BLOCK_TOKENS] = head[h * width + i];
      const float* value = head + (a.kv_heads + h) * width;
      std::memcpy(a.values + ((block * a.kv_heads + h) * BLOCK_TOKENS + at) * width, value, width * sizeof(float));
    }
  });
}

}  // extern "C"

namespace {

// Scores of HEADS query heads against BLOCKS blocks of keys: dots over head_dim, ascending, a lane per position.
template <int HEADS, int BLOCKS>
void score(const float* q, int width, const float* const* keys, const float* const* next, float factor, float* scores,
           int64_t stride) {
  F16 acc[HEADS][BLOCKS];
  for (int h = 0; h < HEADS; h++)
    for (int b = 0; b < BLOCKS; b++) acc[h][b] = all(0.0f);
  for (int i = 0; i < width; i++) {
    F16 key[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) {
      key[b] = load(keys[b] + i * BLOCK_TOKENS);
      prefetch(next[b] + i * BLOCK_TOKENS);
    }
    for (int h = 0; h < HEADS; h++)
      for (int b = 0; b < BLOCKS; b++) acc[h][b] = fma(all(q[h * width + i]), key[b], acc[h][b]);
  }
  for (int h = 0; h < HEADS; h++)
    for (int b = 0; b < BLOCKS; b++) store(scores + h * stride + b * BLOCK_TOKENS, acc[h][b] * all(factor));
}

// out[h] = sum over positions, ascending, of weight * value, for VECTORS vectors of head_dim; divided by the total.
template <int HEADS, int VECTORS>
void gather(const float* weights, int64_t stride, const float* totals, int length, const int32_t* table, int64_t head,
            int64_t kv_heads, int width, const float* values, float* out) {
  F16 acc[HEADS][VECTORS];
  for (int h = 0; h < HEADS; h++)
    for (int v = 0; v < VECTORS; v++) acc[h][v] = all(0.0f);
  for (int from = 0; from < length; from += BLOCK_TOKENS) {
    const float* value = values + (table[from / BLOCK_TOKENS] * kv_heads + head) * BLOCK_TOKENS * width;
    const int until = std::min(length, from + BLOCK_TOKENS);
    const float* next = until < length ? values + (table[until / BLOCK_TOKENS] * kv_heads + head) * BLOCK_TOKENS * width
                                       : value;
    for (int p = from; p < until; p++, value += width, next += width)
      for (int v = 0; v < VECTORS; v++) {
        const F16 wide = load(value + v * LANES);
        prefetch(next + v * LANES);
        for (int h = 0; h < HEADS; h++) acc[h][v] = fma(all(weights[h * stride + p]), wide, acc[h][v]);
      }
  }
  for (int h = 0; h < HEADS; h++)
    for (int v = 0; v < VECTORS; v++) store(out + h * width + v * LANES, acc[h][v] / all(totals[h]));
}

template <int HEADS, int VECTORS>
void gather_some(int vectors, const float* weights, int64_t stride, const float* totals, int length,
                 const int32_t* table, int64_t head, int64_t kv_heads, int width, const float* values, float* out) {
  if constexpr (VECTORS > 1)
    if (vectors < VECTORS)
      return gather_some<HEADS, VECTORS - 1>(vectors, weights, stride, totals, length, table, head, kv_heads, width,
                                             values, out);
  gather<HEADS, VECTORS>(weights, stride, totals, length, table, head, kv_heads, width, values, out);
}

template <int HEADS>
void attend(int heads, const Attention& a, const float* q, int length, const int32_t* table, int64_t kv_head,
            float* out) {
  if constexpr (HEADS > 1)
    if (heads < HEADS) return attend<HEADS - 1>(heads, a, q, length, table, kv_head, out);
  const int width = a.head_dim, blocks = (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  const int64_t stride = int64_t(blocks) * BLOCK_TOKENS;
  thread_local std::vector<float> scratch;
  if (scratch.size() < size_t(HEADS * stride)) scratch.resize(HEADS * stride);
  float* scores = scratch.data();
  const float factor = 1.0f / std::sqrt(float(width));
  const auto at = [&](const float* cache, int block) {
    return cache + (table[block] * int64_t(a.kv_heads) + kv_head) * width * BLOCK_TOKENS;
  };
  // What is read next is fetched meanwhile: the following blocks' keys, at the end the first blocks' values.
  const auto soon = [&](int block) { return block < blocks ? at(a.keys, block) : at(a.values, block - blocks); };
  int block = 0;
  for (; block + 2 <= blocks; block += 2) {
    const float* keys[2] = {at(a.keys, block), at(a.keys, block + 1)};
    const float* next[2] = {soon(block + 2), soon(block + 3)};
    score<HEADS, 2>(q, width, keys, next, factor, scores + block * BLOCK_TOKENS, stride);
  }
  if (block < blocks) {
    const float* keys[1] = {at(a.keys, block)};
    const float* next[1] = {soon(block + 1)};
    score<HEADS, 1>(q, width, keys, next, factor, scores + block * BLOCK_TOKENS, stride);
  }
  float totals[HEADS];
  for (int h = 0; h < HEADS; h++) {
    float* s = scores + h * stride;
    for (int64_t p = length; p < stride; p++) s[p] = -INFINITY;  // positions of the last block that are not ours
    F16 most = all(-INFINITY);
    for (int64_t p = 0; p < stride; p += LANES) most = larger(most, load(s + p));
    const F16 top = all(largest(most));
    for (int64_t p = 0; p < stride; p += LANES) store(s + p, exponential(load(s + p) - top));
    for (int64_t p = length; p < stride; p++) s[p] = 0.0f;
    F16 total = all(0.0f);
    for (int64_t p = 0; p < stride; p += LANES) total = total + load(s + p);
    totals[h] = sum(total);
  }
  const int vectors = width / LANES;
  for (int v = 0; v < vectors; v += VECTORS_AT_ONCE)
    gather_some<HEADS, VECTORS_AT_ONCE>(std::min(VECTORS_AT_ONCE, vectors - v), scores, stride, totals, length, table,
                                        kv_head, a.kv_heads, width, a.values + v * LANES, out + v * LANES);
}

inline uint64_t mixed(uint64_t x) {  // the finalizer of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The uniform number of (seed, position) in [0, 1); sampler.py has the same.
inline double noise(uint64_t seed, uint64_t position) {
  const uint64_t step = 0x9e3779b97f4a7c15ull;
  return double(mixed(mixed(seed + step) + (position + 1) * step) >> 11) * 0x1.0p-53;
}

// Inverse distribution function: over the nucleus from the likeliest down, or over all in order of their ids.
int32_t draw(const float* logits, int vocab, float top, double u, float temperature, float top_p) {
  thread_local std::vector<float> likely;
  const int padded = (vocab + LANES - 1) / LANES * LANES;
  likely.resize(padded);
  for (int i = 0; i < padded; i++) likely[i] = i < vocab ? (logits[i] - top) / temperature : -INFINITY;
  for (int i = 0; i < padded; i += LANES) store(&likely[i], exponential(load(&likely[i])));
  double total = 0;
  for (int i = 0; i < vocab; i++) total += likely[i];
  if (top_p >= 1.0f) {
    double sofar = 0;
    int32_t last = 0;
    for (int i = 0; i < vocab; i++) {
      sofar += likely[i];
      last = i;
      if (sofar > u * total) break;
    }
    return last;
  }
  thread_local std::vector<int32_t> heap, nucleus;
  heap.resize(vocab);
  nucleus.clear();
  for (int i = 0; i < vocab; i++) heap[i] = i;
  const auto below = [&](int32_t a, int32_t b) { return likely[a] < likely[b] || (likely[a] == likely[b] && a > b); };
  std::make_heap(heap.begin(), heap.end(), below);
  double mass = 0;
  for (auto end = heap.end(); end != heap.begin() && (nucleus.empty() || mass < double(top_p) * total); --end) {
    std::pop_heap(heap.begin(), end, below);
    nucleus.push_back(*(end - 1));
    mass += likely[nucleus.back()];
  }
  double sofar = 0;
  for (int32_t id : nucleus) {
    sofar += likely[id];
    if (sofar > u * mass) return id;
  }
  return nucleus.back();
}

}  // namespace

extern "C" {

// out [n, heads, head_dim]: each row attends to its sequence's positions up to and including its own.
void engine_attend(const float* qkv, int n, const Attention* about, float* out) {
  const Attention a = *about;
  const int group = a.heads / a.kv_heads;
  pool->run(n * a.kv_heads, [=](int task) {
    const int row = task / a.kv_heads, kv_head = task % a.kv_heads;
    const int32_t* table = a.tables + int64_t(a.tables_of[row]) * a.table_length;
    const float* q = qkv + int64_t(row) * (a.heads + 2 * a.kv_heads) * a.head_dim;
    for (int h = 0; h < group; h += HEADS_AT_ONCE) {
      const int64_t at = int64_t(kv_head * group + h) * a.head_dim;
      attend<HEADS_AT_ONCE>(std::min(HEADS_AT_ONCE, group - h), a, q + at, a.positions[row] + 1, table, kv_head,
                            out + int64_t(row) * a.heads * a.head_dim + at);
    }
  });
}

// out [n, inner] = silu(gate) * up of rows that hold gate [inner], up [inner].
void engine_silu_mul(const float* gate_up, int n, int inner, float* out) {
  pool->run(n, [=](int row) {
    const float* gate = gate_up + int64_t(row) * 2 * inner;
    for (int i = 0; i < inner; i += LANES) {
      const F16 g = load(gate + i);
      const F16 silu = g / (all(1.0f) + exponential(all(0.0f) - g));
      store(out + int64_t(row) * inner + i, silu * load(gate + inner + i));
    }
  });
}

// ids[row]: the likeliest id, lowest first among equals, at temperature 0, else a draw; -1 if a logit is not finite.
void engine_sample(const float* logits, int n, int vocab, const uint64_t* seeds, const int64_t* positions,
                   const float* temperatures, const float* top_ps, int32_t* ids) {
  pool->run(n, [=](int row) {
    const float* from = logits + int64_t(row) * vocab;
    int32_t best = 0;
    bool finite = true;
    for (int i = 0; i < vocab; i++) {
      finite &= std::fabs(from[i]) <= 3.4e38f;
      if (from[i] > from[best]) best = i;
    }
    if (!finite) best = -1;
    else if (temperatures[row] > 0)
      best = draw(from, vocab, from[best], noise(seeds[row], positions[row]), temperatures[row], top_ps[row]);
    ids[row] = best;
  });
}

}  // extern "C"
