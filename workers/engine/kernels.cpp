// The engine's arithmetic on the CPU, float32, behind a plain C interface (native.py holds the Python side). Products
// with a bfloat16 weight are the exception where the CPU has an instruction for them.
//
// Contract: every output row is a function of its own inputs alone, to the bit. Each output element is one chain of
// fused multiply-adds in a fixed order, whatever the number of rows, the block it falls into, the thread that computes
// it, or the width of the machine's vectors: F16 has sixteen lanes everywhere and the same reduction tree.
// A product of bfloat16 is one chain too, of pairs; how a pair is rounded is the CPU's own affair.
// Callers guarantee: sizes named k, hidden, head_dim, inner are multiples of 16; buffers do not overlap unless said.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int PANEL = 32;         // output features per packed panel of a weight
constexpr int BLOCK_TOKENS = 16;  // positions per KV block, see kv_blocks.py
constexpr int MAX_RANK = 512;
constexpr int AHEAD = 512;        // elements by which streams of weights are fetched ahead

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
constexpr int GEMM_ROWS = 12, GEMM_WIDE = 2, HEADS_AT_ONCE = 4, VECTORS_AT_ONCE = 4, CHAINS = 16, RANKS_AT_ONCE = 4;
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
constexpr int GEMM_ROWS = 6, GEMM_WIDE = 1, HEADS_AT_ONCE = 3, VECTORS_AT_ONCE = 2, CHAINS = 4, RANKS_AT_ONCE = 1;
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
constexpr int GEMM_ROWS = 4, GEMM_WIDE = 1, HEADS_AT_ONCE = 2, VECTORS_AT_ONCE = 2, CHAINS = 4, RANKS_AT_ONCE = 1;
#endif

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// Values of 16 bits, read as the float32 that each of them is exactly.
struct Bf16 { uint16_t bits; };
struct Half { uint16_t bits; };
#if defined(__AVX512F__)
inline F16 load(const Bf16* p) {
  // One shuffle in place of a widening and a shift: word i comes into the upper half of lane i.
  const __m512i bits = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, _mm512_slli_epi32(lanes, 16), bits))};
}
inline F16 load(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
#elif defined(__AVX2__) && defined(__FMA__)
inline __m128i eight(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256 widened(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
inline F16 load(const Bf16* p) { return {widened(eight(p)), widened(eight(p + 8))}; }
inline F16 load(const Half* p) { return {_mm256_cvtph_ps(eight(p)), _mm256_cvtph_ps(eight(p + 8))}; }
#else
inline float as_float(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline float widened(Bf16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float widened(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 31) return as_float(sign | 0x7f800000 | fraction << 13);
  if (exponent) return as_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float tiny = float(fraction) * 0x1p-24f;
  return sign ? -tiny : tiny;
}
template <typename Value>
inline F16 load(const Value* p) { F16 r; EACH_LANE r.v[l] = widened(p[l]); return r; }
#endif

// Two neighbours in k of a bfloat16 matrix, the even one in the lower half: four bytes, as a float. A panel of a weight
// is [k][32] floats or [k / 2][32] pairs.
struct Pair { uint32_t bits; };
#if defined(__AVX512BF16__)
struct P16 { __m512bh v; };
inline P16 load(const Pair* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
inline P16 all(Pair x) { return {(__m512bh)_mm512_set1_epi32(int(x.bits))}; }
inline F16 fma(P16 a, P16 b, F16 c) { return {_mm512_dpbf16_ps(c.v, a.v, b.v)}; }
#endif

// Memory that will be read soon, fetched into the second-level cache while something else is computed: a product whose
// rows fit few registers' worth of work waits for its weights otherwise, first for the memory and then for itself.
//
// Evenly, a line every so many steps: lines that are asked for in bursts hold the buffers which the product's own loads
// miss through.
class Soon {
 public:
  void add(const void* from, int64_t bytes) {
    if (bytes <= 0 || count_ == SPANS) return;
    const char* begin = static_cast<const char*>(from);
    spans_[count_++] = {begin, begin + bytes};
    lines_ += bytes / LINE + 1;
  }

  // Spreads what was added over `steps` calls of `step`.
  void spread(int64_t steps) {
    rest_.rate = per_step(lines_, steps);
    if (count_) rest_.at = spans_[0].from;
  }

  // Besides, from now on: the memory at `from` (null: none) over the next `steps` calls.
  void next(const void* from, int64_t bytes, int64_t steps) {
    next_ = {static_cast<const char*>(from), from ? per_step(bytes / LINE, steps) : 0, 0};
  }

  inline void step() {
    if (rest_.step() && rest_.at >= spans_[span_].until) advance();
    next_.step();
  }

 private:
  static constexpr int SPANS = 64, LINE = 64;
  static constexpr uint32_t ONE = 1 << 16;
  struct Span {
    const char *from, *until;
  };
  struct Pace {
    const char* at = nullptr;
    uint32_t rate = 0, due = 0;  // in lines / ONE; at most a line a step

    inline bool step() {
      due += rate;
      if (due < ONE) return false;
      due -= ONE;
      __builtin_prefetch(at, 0, 2);
      at += LINE;
      return true;
    }
  };

  static uint32_t per_step(int64_t lines, int64_t steps) {
    return uint32_t(std::min<int64_t>(ONE, (lines * ONE + steps - 1) / std::max<int64_t>(1, steps)));
  }

  void advance() {
    if (++span_ < count_) rest_.at = spans_[span_].from;
    else rest_ = {};
  }

  Span spans_[SPANS];
  int count_ = 0, span_ = 0;
  int64_t lines_ = 0;
  Pace rest_, next_;
};

// One tree everywhere: lanes l and l + 8, then 4, 2 and 1 apart.
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
inline float sum(F16 a) {
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float sum(F16 a) {
  float v[LANES];
  store(v, a);
  for (int width = LANES / 2; width; width /= 2)
    for (int l = 0; l < width; l++) v[l] += v[l + width];
  return v[0];
}
#endif

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
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
  }

  ~Pool() {
    stop_.store(true);
    wake();
    for (auto& helper : helpers_) helper.join();
  }

  int threads() const { return threads_; }

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

  const int threads_;
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

// y[r][c] = sum over i of w[i][c] * x[i][r], i ascending: WIDE vectors of one panel against ROWS packed rows, of floats
// or of Pairs. `depth`: how many of them.
template <int ROWS, int WIDE, typename Element>
void multiply(const Element* w, const Element* x, int depth, float* y, int64_t y_stride, Soon& soon) {
  F16 acc[ROWS][WIDE];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < WIDE; c++) acc[r][c] = all(0.0f);
  for (int i = 0; i < depth; i++, w += PANEL, x += ROWS) {
    decltype(load(w)) wide[WIDE];
    for (int c = 0; c < WIDE; c++) wide[c] = load(w + c * LANES);
    for (int c = 0; c < WIDE; c++) prefetch(w + AHEAD + c * LANES);
    soon.step();
    for (int r = 0; r < ROWS; r++) {
      const auto value = all(x[r]);
      for (int c = 0; c < WIDE; c++) acc[r][c] = fma(wide[c], value, acc[r][c]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < WIDE; c++) store(y + r * y_stride + c * LANES, acc[r][c]);
}

template <int ROWS, typename Element>
void multiply_panel(int rows, const Element* w, const Element* x, int depth, float* y, int64_t y_stride, Soon& soon) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_panel<ROWS - 1>(rows, w, x, depth, y, y_stride, soon);
  for (int c = 0; c < PANEL / LANES; c += GEMM_WIDE)
    multiply<ROWS, GEMM_WIDE>(w + c * LANES, x, depth, y + c * LANES, y_stride, soon);
}

// Rows of x [rows, k] as a block reads them: [depth][rows].
void side_by_side(const float* x, int k, int rows, float* out) {
  for (int i = 0; i < k; i++)
    for (int r = 0; r < rows; r++) out[int64_t(i) * rows + r] = x[int64_t(r) * k + i];
}

#if defined(__AVX512BF16__)
// Rounds to the nearest bfloat16, to the even one of two.
void side_by_side(const float* x, int k, int rows, Pair* out) {
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < k; i += LANES) {
      Pair pairs[LANES / 2];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs), (__m256i)_mm512_cvtneps_pbh(load(x + int64_t(r) * k + i).v));
      for (int j = 0; j < LANES / 2; j++) out[int64_t(i / 2 + j) * rows + r] = pairs[j];
    }
}
#endif

}  // namespace

extern "C" {

// Threads of every later call. Call it before anything else, never while another call runs.
void engine_threads(int threads) { pool = std::make_unique<Pool>(threads); }

// Puts w [d, depth] at features first.. of packed [ceil(all features / 32)][depth][32], which began as zeros. Elements
// are floats or Pairs.
void engine_pack(const uint32_t* w, int d, int depth, uint32_t* packed, int first) {
  const int from = first / PANEL, until = (first + d + PANEL - 1) / PANEL;
  pool->run(until - from, [=](int task) {
    const int panel = from + task;
    const int low = std::max(first, panel * PANEL), high = std::min(first + d, (panel + 1) * PANEL);
    uint32_t* out = packed + int64_t(panel) * depth * PANEL + low % PANEL;
    const uint32_t* in = w + int64_t(low - first) * depth;
    for (int i = 0; i < depth; i++, in++, out += PANEL)
      for (int j = 0; j < high - low; j++) out[j] = in[int64_t(j) * depth];
  });
}

// out[row] = row ids[row] of the weight that was packed [d, depth].
void engine_embed(const uint32_t* packed, int depth, const int32_t* ids, int n, uint32_t* out) {
  pool->run(n, [=](int row) {
    const uint32_t* from = packed + int64_t(ids[row] / PANEL) * depth * PANEL + ids[row] % PANEL;
    for (int i = 0; i < depth; i++) out[int64_t(row) * depth + i] = from[int64_t(i) * PANEL];
  });
}

// One adapted matrix of one layer: where A [r, k] and B [r, d] (rank-major) lie in a slot's values, its scale and its
// rank (how many of the r it uses; 0: none) in its floats, and its d outputs in a row of y.
struct Adapted {
  int64_t a, b, scale, rank;
  int32_t d, y;
};

// Slots first .. first + slots - 1 lie one after the other at `data`; all have the layout that `matrices` describes. A
// slot's first float is the precision of its values, which begin `values` floats behind it.
struct SlotPool {
  const float* data;
  int64_t slot_floats, values;
  const Adapted* matrices;
  int32_t first, slots;
};

}  // extern "C"

namespace {

constexpr int TOGETHER = 4;  // rows of one slot that share every read of its weights
enum { F32 = 1, BF16 = 2, F16_VALUES = 3 };  // slot_image.py's Precision

// Up to TOGETHER rows with one slot, and one of its matrices.
struct Adaptation {
  const float *slot, *values;
  const Adapted* matrix;
  int from, rows;  // in `order`

  int rank() const { return int(slot[matrix->rank]); }
  int precision() const { return int(slot[0]); }
  template <typename Value>
  const Value* at(int64_t value) const { return reinterpret_cast<const Value*>(values) + value; }
  const char* where(int64_t value) const { return reinterpret_cast<const char*>(values) + value * bytes(); }
  int64_t bytes() const { return precision() == F32 ? 4 : 2; }
};

constexpr int power_below(int n) { return n < 2 ? 1 : 2 * power_below(n / 2); }

// low[j][r] = scale * (A x[r])[j] for RANKS rows of A [.., k], which share every read of x. Each dot product has four
// partial sums (vectors i mod 4), of which PARTS are computed at a time: the same for every ROWS, RANKS and PARTS.
template <int ROWS, int RANKS, int PARTS, typename Value>
void shrink(const Value* a, int k, const float* const* x, float scale, float (*low)[ROWS]) {
  constexpr int ALL = 4;
  F16 sums[ROWS][RANKS][ALL];
  for (int from = 0; from < ALL; from += PARTS) {
    F16 acc[PARTS][ROWS][RANKS];
    for (int p = 0; p < PARTS; p++)
      for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < RANKS; j++) acc[p][r][j] = all(0.0f);
    const auto add = [&](int p, int i) {
      F16 wide[RANKS];
      for (int j = 0; j < RANKS; j++) wide[j] = load(a + int64_t(j) * k + i);
      for (int r = 0; r < ROWS; r++) {
        const F16 value = load(x[r] + i);
        for (int j = 0; j < RANKS; j++) acc[p][r][j] = fma(wide[j], value, acc[p][r][j]);
      }
    };
    int i = from * LANES;
    for (; i + PARTS * LANES <= k; i += ALL * LANES)
      for (int p = 0; p < PARTS; p++) add(p, i + p * LANES);
    for (int p = 0; p < PARTS; p++)
      if (i + p * LANES < k) add(p, i + p * LANES);
    for (int p = 0; p < PARTS; p++)
      for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < RANKS; j++) sums[r][j][from + p] = acc[p][r][j];
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < RANKS; j++) {
      const F16* parts = sums[r][j];
      low[j][r] = scale * sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
    }
}

// WIDE vectors of out[r] from c on = B low[r]; each output adds its rank-one terms in ascending order.
template <int ROWS, int WIDE, typename Value>
void expand(const Value* b, int64_t d, int rank, const float (*low)[ROWS], float* const* out, int c) {
  F16 acc[ROWS][WIDE];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDE; v++) acc[r][v] = all(0.0f);
  for (int j = 0; j < rank; j++)
    for (int v = 0; v < WIDE; v++) {
      const F16 wide = load(b + j * d + c + v * LANES);
      for (int r = 0; r < ROWS; r++) acc[r][v] = fma(all(low[j][r]), wide, acc[r][v]);
    }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDE; v++) store(out[r] + c + v * LANES, acc[r][v]);
}

// out = scale * B (A x) for ROWS rows, as many chains at a time as registers hold.
template <int ROWS, typename Value>
void adapt(const Adaptation& of, int k, const float* const* x, float* const* out) {
  constexpr int RANKS = RANKS_AT_ONCE, PARTS = std::min(4, power_below(CHAINS / ROWS / RANKS));
  constexpr int WIDE = std::min(8, power_below(CHAINS / ROWS));
  const Adapted& m = *of.matrix;
  const int rank = of.rank();
  const float scale = of.slot[m.scale];
  float low[MAX_RANK][ROWS];
  const Value* a = of.at<Value>(m.a);
  int j = 0;
  for (; j + RANKS <= rank; j += RANKS) shrink<ROWS, RANKS, PARTS>(a + int64_t(j) * k, k, x, scale, low + j);
  for (; j < rank; j++) shrink<ROWS, 1, PARTS>(a + int64_t(j) * k, k, x, scale, low + j);
  const Value* b = of.at<Value>(m.b);
  int c = 0;
  for (; c + WIDE * LANES <= m.d; c += WIDE * LANES) expand<ROWS, WIDE>(b, m.d, rank, low, out, c);
  for (; c < m.d; c += LANES) expand<ROWS, 1>(b, m.d, rank, low, out, c);
}

template <int ROWS>
void adapt_some(const Adaptation& of, int k, const float* const* x, float* const* out) {
  if constexpr (ROWS > 1)
    if (of.rows < ROWS) return adapt_some<ROWS - 1>(of, k, x, out);
  switch (of.precision()) {
    case F32: return adapt<ROWS, float>(of, k, x, out);
    case BF16: return adapt<ROWS, Bf16>(of, k, x, out);
    case F16_VALUES: return adapt<ROWS, Half>(of, k, x, out);
    default: std::abort();  // a slot that has a rank has a precision
  }
}

// What of a batch is adapted: every matrix that a row's slot has, in order of the slots.
std::vector<Adaptation> adaptations(int n, const int32_t* slots, const int32_t* order, const SlotPool* pools,
                                    int pool_count, int matrices) {
  std::vector<Adaptation> found;
  for (int from = 0, until; from < n; from = until) {
    const int slot = slots[order[from]];
    for (until = from + 1; until < n && until - from < TOGETHER && slots[order[until]] == slot;) until++;
    for (const SlotPool* p = pools; slot && p < pools + pool_count; p++) {
      if (slot < p->first || slot >= p->first + p->slots) continue;
      const float* weights = p->data + int64_t(slot - p->first) * p->slot_floats;
      for (int m = 0; m < matrices; m++)
        if (weights[p->matrices[m].rank] > 0) found.push_back({weights, weights + p->values, p->matrices + m, from, until - from});
    }
  }
  return found;
}

// y [n, d] = x [n, k] times the transposed weight, plus, per row, what its slot's matrices make of it (of the float32 x
// whatever the weight's elements are). scratch holds n * k floats, delta n * d (or null where nothing is adapted).
//
// A product of few rows waits for the memory only while it meets its weights for the first time, and adapters of many
// slots are all waiting and hardly any arithmetic. So each task has a share of both: while its product is computed, the
// weights of its next panel and of its adapters are on their way.
template <typename Element>
void project(const Element* packed, int d, int k, const float* x, int n, float* y, float* scratch,
             const std::vector<Adaptation>& adapted, const int32_t* order, float* delta) {
  const int depth = std::is_same_v<Element, Pair> ? k / 2 : k;
  Element* const blocked = reinterpret_cast<Element*>(scratch);
  const int blocks = (n + GEMM_ROWS - 1) / GEMM_ROWS;
  const auto first = [=](int block) { return int(int64_t(n) * block / blocks); };
  pool->run(blocks, [=](int block) {
    const int from = first(block), rows = first(block + 1) - from;
    side_by_side(x + int64_t(from) * k, k, rows, blocked + int64_t(from) * depth);
  });
  const int panels = (d + PANEL - 1) / PANEL;
  const int together = std::max(1, std::min(2, panels / 16));
  const int tasks = (panels + together - 1) / together, count = int(adapted.size());
  const int64_t size = int64_t(depth) * PANEL;
  const auto share = [=](int panel) { return int(int64_t(count) * panel / panels); };
  const auto pointers = [=](const Adaptation& of, float* base, float** out) {
    for (int r = 0; r < of.rows; r++) out[r] = base + int64_t(order[of.from + r]) * d + of.matrix->y;
  };
  const int64_t steps = int64_t(blocks) * depth * (PANEL / LANES / GEMM_WIDE);  // of one panel
  pool->run(tasks, [&](int task) {
    const int begin = task * together, until = std::min(panels, begin + together);
    Soon soon;
    for (int i = share(begin); blocks > 1 && i < share(until); i++) {
      const Adaptation& of = adapted[i];
      if (i > share(begin) && of.slot == adapted[i - 1].slot && of.matrix == adapted[i - 1].matrix) continue;
      soon.add(of.where(of.matrix->a), of.rank() * of.bytes() * k);
      soon.add(of.where(of.matrix->b), of.rank() * of.bytes() * of.matrix->d);
    }
    soon.spread((until - begin) * steps);
    for (int panel = begin; panel < until; panel++) {
      const Element* w = packed + panel * size;
      // After the task's last panel probably comes the first one of the task that no other thread takes.
      const int next = panel + 1 < until ? panel + 1 : (task + pool->threads()) * together;
      soon.next(blocks > 1 && next < panels ? packed + next * size : nullptr, size * sizeof(Element), steps);
      const int width = std::min(PANEL, d - panel * PANEL);
      for (int block = 0; block < blocks; block++) {
        const int from = first(block), rows = first(block + 1) - from;
        float* out = y + int64_t(from) * d + panel * PANEL;
        const Element* in = blocked + int64_t(from) * depth;
        if (width == PANEL) {
          multiply_panel<GEMM_ROWS>(rows, w, in, depth, out, d, soon);
        } else {
          float edge[GEMM_ROWS * PANEL];
          multiply_panel<GEMM_ROWS>(rows, w, in, depth, edge, PANEL, soon);
          for (int r = 0; r < rows; r++) std::memcpy(out + int64_t(r) * d, edge + r * PANEL, width * sizeof(float));
        }
      }
    }
    for (int i = share(begin); i < share(until); i++) {
      const Adaptation& of = adapted[i];
      const float* in[TOGETHER];
      float* out[TOGETHER];
      for (int r = 0; r < of.rows; r++) in[r] = x + int64_t(order[of.from + r]) * k;
      pointers(of, delta, out);
      adapt_some<TOGETHER>(of, k, in, out);
    }
  });
  pool->run(std::min(count, tasks), [&](int task) {
    for (int i = count * task / std::min(count, tasks); i < count * (task + 1) / std::min(count, tasks); i++) {
      const Adaptation& of = adapted[i];
      float *out[TOGETHER], *add[TOGETHER];
      pointers(of, y, out);
      pointers(of, delta, add);
      for (int r = 0; r < of.rows; r++)
        for (int c = 0; c < of.matrix->d; c += LANES) store(out[r] + c, load(out[r] + c) + load(add[r] + c));
    }
  });
}

void project(const void* packed, int pairs, int d, int k, const float* x, int n, float* y, float* scratch,
             const std::vector<Adaptation>& adapted, const int32_t* order, float* delta) {
  if (!pairs) return project(static_cast<const float*>(packed), d, k, x, n, y, scratch, adapted, order, delta);
#if defined(__AVX512BF16__)
  project(static_cast<const Pair*>(packed), d, k, x, n, y, scratch, adapted, order, delta);
#else
  std::abort();  // native.py packs none for this build
#endif
}

}  // namespace

extern "C" {

// y [n, d] = x [n, k] times the transposed weight, whose elements are floats or (`pairs`) Pairs. scratch holds n * k
// floats.
void engine_linear(const void* packed, int pairs, int d, int k, const float* x, int n, float* y, float* scratch) {
  project(packed, pairs, d, k, x, n, y, scratch, {}, nullptr, nullptr);
}

// The same, and y[row] += scale * B (A x[row]) with the row's slot, for each matrix; slot 0 and rank 0 add nothing.
// `order` lists the rows with those of one slot together. scratch holds n * (k + d) floats.
void engine_project(const void* packed, int pairs, int d, int k, const float* x, int n, const int32_t* slots,
                    const int32_t* order, const SlotPool* pools, int pool_count, int matrices, float* y,
                    float* scratch) {
  const auto adapted = adaptations(n, slots, order, pools, pool_count, matrices);
  project(packed, pairs, d, k, x, n, y, scratch, adapted, order, scratch + int64_t(n) * k);
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

// Inverse distribution function: over the likeliest that are left, from the likeliest down, or over all in order of ids.
int32_t draw(const float* logits, int vocab, float top, double u, float temperature, float top_p, int top_k,
             float min_p) {
  thread_local std::vector<float> likely;
  const int padded = (vocab + LANES - 1) / LANES * LANES;
  likely.resize(padded);
  for (int i = 0; i < padded; i++) likely[i] = i < vocab ? (logits[i] - top) / temperature : -INFINITY;
  for (int i = 0; i < padded; i += LANES) store(&likely[i], exponential(load(&likely[i])));
  double total = 0;
  for (int i = 0; i < vocab; i++) total += likely[i];
  if (top_p >= 1.0f && top_k == 0 && min_p <= 0.0f) {
    double sofar = 0;
    int32_t last = 0;
    for (int i = 0; i < vocab; i++) {
      sofar += likely[i];
      last = i;
      if (sofar > u * total) break;
    }
    return last;
  }
  thread_local std::vector<int32_t> heap, left;
  heap.resize(vocab);
  left.clear();
  for (int i = 0; i < vocab; i++) heap[i] = i;
  const auto below = [&](int32_t a, int32_t b) { return likely[a] < likely[b] || (likely[a] == likely[b] && a > b); };
  std::make_heap(heap.begin(), heap.end(), below);
  // With top_k, the nucleus' mass is a share of what the k likeliest have: they are counted first.
  double wanted = top_p >= 1.0f ? INFINITY : double(top_p) * total, mass = 0;
  const int most = top_k > 0 ? std::min(top_k, vocab) : vocab;
  for (auto end = heap.end(); int(left.size()) < most && (top_k > 0 || left.empty() || mass < wanted); --end) {
    std::pop_heap(heap.begin(), end, below);
    const int32_t id = *(end - 1);
    if (top_k == 0 && !left.empty() && double(likely[id]) < double(min_p) * likely[left[0]]) break;
    left.push_back(id);
    mass += likely[id];
  }
  if (top_k > 0 && top_p < 1.0f) {
    wanted = double(top_p) * mass;
    mass = 0;
    size_t kept = 0;
    while (kept < left.size() && (kept == 0 || mass < wanted)) mass += likely[left[kept++]];
    left.resize(kept);
  }
  while (double(likely[left.back()]) < double(min_p) * likely[left[0]]) left.pop_back();
  mass = 0;
  for (int32_t id : left) mass += likely[id];
  double sofar = 0;
  for (int32_t id : left) {
    sofar += likely[id];
    if (sofar > u * mass) return id;
  }
  return left.back();
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
                   const float* temperatures, const float* top_ps, const int32_t* top_ks, const float* min_ps,
                   int32_t* ids) {
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
      best = draw(from, vocab, from[best], noise(seeds[row], positions[row]), temperatures[row], top_ps[row],
                  top_ks[row], min_ps[row]);
    ids[row] = best;
  });
}

}  // extern "C"
