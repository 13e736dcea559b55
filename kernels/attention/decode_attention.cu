// SPDX-License-Identifier: Apache-2.0
// Attention of one new token of each request over a paged cache of K and V, E4M3 or BF16, which it joins: every byte is read
// once.
//
// Shape suffixes: R requests, H query heads, G KV heads, D the head dimension. Built for one configuration by these macros:
//   HEAD      D: 64, 96, 128 or 256
//   KV_HEADS  G
//   GROUP     query heads of one KV head: H / G, at most 16
//   BYTES     of a value of the cache, and of Q: 1, E4M3, or 2, BF16
//   WINDOWED  1: a token attends to its neighbours alone, a sliding window of `Options::window` tokens
//   CAPPED    1: scores are soft-capped, cap tanh(score / cap)
//   SINKS     1: each query head has a score more, whose weight adds nothing
//   TOGETHER  KV heads of a block, a divisor of KV_HEADS
//   SHARES    shares of the work in a block; it has TOGETHER x SHARES warps
//   STAGES    tiles of K and V that a warp has in flight
//   RESIDENT  blocks on a multiprocessor
//
// The contexts of all requests are cut into tiles of 16 tokens and laid end to end; each of `shares` shares takes the same
// number of neighbouring tiles, and in it one warp takes each KV head. A request that lies in one share is finished there.
// Of another each share leaves a part: numerators, the largest score and the sum of weights, in a slot of its own (share +
// request: both only grow along the tiles, so no two parts meet), and `combine_attention` adds the parts, in the order of the
// shares. No atomics: the same lengths give the same bits.
//
// A warp's loop, with tensor cores in FP16, in which codes are exact, or BF16, and sums in fp32: scores[tokens, heads] =
// K Q^T, weights = exp2(scores - largest), transposed in registers, numerators[D, heads] += V^T weights. Both products take
// the cache as their M side, so heads fill the N side of 8. What belongs to which row or column of a fragment is free where
// it is summed over or put back: it is chosen so that a thread reads 16 bytes of the cache at a time, without a transpose
// of V.
//
// The new token's K and V come as BF16. Who has the tile that it belongs to quantizes them for a cache of codes, and puts
// them into the tile and, where the request has a slot for it, into the cache. Requests may share blocks, and one may read
// what another one's new token completes in the same launch (vLLM finds a block in its prefix cache as soon as the step that
// fills it is scheduled). That token is a block's last; who reads such a block, a lent one, takes it from the other
// request's K and V instead.
//
// So nothing that is read from the cache is new, and a launch that begins before the previous kernel has ended
// (griddepcontrol) waits for Q, K and V alone. With EARLY_REQUESTS or more the kernel behind both may likewise
// begin to fetch its weights.
//
// Outputs are BF16, or what quantizes these for a linear layer behind attention: E4M3 codes, and a scale for each token and
// head, whose D columns are a block of such a layer.
//
// With a sliding window a context's tiles begin with the one that the window begins in; what lies before it in that tile is
// neither read nor seen.
//
// Shared memory: for each warp a ring of STAGES tiles, each TILE x DIM values of K, then of V, whose 16-byte chunks are swizzled
// so that neither copies nor loads meet in a bank; then the lent blocks, and where each request's tiles begin. DIM is D, or
// 128 for 96: what lies behind a head's values is zero there.

#include "device.cuh"

constexpr u32 DIM = HEAD == 96 ? 128 : HEAD;
constexpr u32 TILE = 16;
constexpr u32 BLOCK = 128;  // columns of outputs that have a scale, and that a warp combines
constexpr u32 HEADS = KV_HEADS * GROUP;
constexpr u32 WARPS = TOGETHER * SHARES;
constexpr u32 THREADS = WARPS * 32;
constexpr u32 SIDES = (GROUP + 7) / 8;  // of 8 heads
constexpr u32 HEAD_BYTES = HEAD * BYTES;  // of a token's K, and of its V, in the cache
constexpr u32 ROW = DIM * BYTES;          // the same in a tile
constexpr u32 CHUNKS = ROW / 16;          // of 16 bytes in a row
constexpr u32 QUARTERS = CHUNKS / 4;
constexpr u32 PASS = 32 / CHUNKS;         // rows that a warp copies at once
constexpr u32 K_TURNS = PASS == 1 ? 2 : 1, V_TURNS = 8 / PASS;  // passes after which chunks are swizzled as before
constexpr u32 SIDE_BYTES = TILE * ROW;    // of K or of V
constexpr u32 OWN = DIM / 8;              // dimensions of which a thread has numerators
constexpr u32 OWN_CHUNKS = OWN * BYTES < 16 ? 1 : OWN * BYTES / 16;
constexpr u32 ROUNDS = DIM < 128 ? 1 : DIM / 128;  // in which a warp moves a token, 4 dimensions a thread
constexpr u32 STAGE_BYTES = 2 * SIDE_BYTES;
constexpr u32 EVERY = 0xFFFFFFFFu;
constexpr u32 PARTS = 8;  // that a warp of combine_attention has in flight
constexpr u32 TOGETHER_OUT = HEAD == 64 && GROUP % 2 == 0 ? 2 : 1;  // heads that a thread writes at once, those of a block
constexpr u32 EARLY_REQUESTS = 8;  // fewer are waited for: what the next kernel fetches ahead would hold theirs up

struct Cache {
  u8* bytes;  // a token of a head: D values of K, then D of V; strides are in bytes
  const int* table_RB;
  u64 table_stride;
  u32 block_stride, token_stride, head_stride, block_tokens;
};

// What not every layer has.
struct Options {
  const bf16* sinks_H;  // scores, as those of tokens are behind the softmax's scale
  u32 window;           // tokens, the new one among them
  float cap;
};

DEVICE void copy_16(u32 to, const u8* from, bool there) {  // zeros if it is not there
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

DEVICE uint4 load_16(u32 from) {
  uint4 found;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "r"(from)
               : "memory");
  return found;
}

DEVICE uint4 load_8(u32 from) {
  uint4 found{};
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(found.x), "=r"(found.y) : "r"(from) : "memory");
  return found;
}

DEVICE u32 word(const uint4& four, u32 i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }

DEVICE u32 low_halves(u32 codes) {  // the two lower codes as two halves
  u32 found;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(found) : "r"(codes));
  return found;
}

DEVICE u32 high_halves(u32 codes) {
  u32 found;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}" : "=r"(found) : "r"(codes));
  return found;
}

DEVICE u32 pack_halves(float low, float high) {
  u32 found;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
  return found;
}

DEVICE u32 pack_bf16(float low, float high) {
  u32 found;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
  return found;
}

DEVICE u32 transposed(u32 matrix) {  // 8 x 8 halves
  u32 found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(matrix));
  return found;
}

DEVICE u32 pack_weights(float low, float high) { return BYTES == 1 ? pack_halves(low, high) : pack_bf16(low, high); }

DEVICE void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (BYTES == 1)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE float exp2_of(float x) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}

DEVICE float inverse_of(float x) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}

DEVICE u32 quantized(float4 values, float scale) {  // as vLLM writes its cache
  return to_codes(__fdiv_rn(values.x, scale), __fdiv_rn(values.y, scale), __fdiv_rn(values.z, scale),
                  __fdiv_rn(values.w, scale));
}

DEVICE float4 four_bf16(uint2 bits) {
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u), __uint_as_float(bits.y << 16),
          __uint_as_float(bits.y & 0xFFFF0000u)};
}

// Where a 16-byte chunk of a tile's token lies among its own. Eight threads at a time load of K from two neighbouring tokens
// four chunks side by side; of V from four, every second one, two chunks, OWN_CHUNKS apart. Where two tokens have 128 bytes
// together, their chunks are swizzled as one row's: sixteen threads load two chunks, in halves, of each of the four.
DEVICE u32 k_chunk(u32 token, u32 chunk) { return CHUNKS == 4 ? chunk : chunk ^ (token & 1) << 2; }
DEVICE u32 v_chunk(u32 token, u32 chunk) {
  const u32 turn = token >> 1 & 3, before = CHUNKS == 4 ? (token & 1) * 4 : 0;
  const u32 by = OWN_CHUNKS == 1 ? turn << 1 : OWN_CHUNKS == 2 ? (turn & 1) | (turn & 2) << 1 : turn;
  return ((before + chunk) ^ by) - before;
}

DEVICE u32 tiles_of(int tokens) { return (static_cast<u32>(tokens) + TILE - 1) / TILE; }

// Tiles of a context that lie before its window, and others.
DEVICE u32 passed_tiles(int tokens, u32 window) {
  return WINDOWED && static_cast<u32>(tokens) > window ? (tokens - window) / TILE : 0;
}
DEVICE u32 seen_tiles(int tokens, u32 window) { return tiles_of(tokens) - passed_tiles(tokens, window); }

// Blocks that new tokens complete, in the order of the requests; room for requests, rounded up to a multiple of 4.
struct Lent {
  u32* blocks;    // no block's number behind the last, up to a multiple of 4
  u32* requests;  // that complete them
  u32 count;

  DEVICE bool has(u32 block) const {
    bool found = false;
#pragma unroll 4
    for (u32 i = 0; i < count; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(blocks + i);
      found |= four.x == block | four.y == block | four.z == block | four.w == block;
    }
    return found;
  }

  // The request that completes a block that it has.
  DEVICE u32 lender(u32 block) const {
    u32 i = 0;
    while (blocks[i] != block) ++i;
    return requests[i];
  }
};

// starts[r] = tiles that the requests before r see; starts[requests] = all. `lent` is filled, if there are `slots_R`. Every thread
// of the block takes part.
DEVICE void lay_end_to_end(const int* lengths_R, u32 window, const long long* slots_R, u32 block_tokens, u32 requests,
                           u32* starts, Lent& lent, u64* of_warp) {
  const u32 thread = threadIdx.x, lane = thread % 32, each = (requests + THREADS - 1) / THREADS;
  const u32 begin = min(requests, thread * each), end = min(requests, begin + each);
  const auto completes = [&](u32 r) {
    return slots_R && slots_R[r] >= 0 && (static_cast<u64>(slots_R[r]) + 1) % block_tokens == 0;
  };
  u64 own = 0;  // tiles, and lent blocks from bit 32 on
  for (u32 r = begin; r < end; ++r) own += seen_tiles(lengths_R[r], window) + (static_cast<u64>(completes(r)) << 32);
  u64 upto = own;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u64 before = __shfl_up_sync(EVERY, upto, step);
    if (lane >= step) upto += before;
  }
  if (lane == 31) of_warp[thread / 32] = upto;
  __syncthreads();
  u64 at = upto - own, all = 0;
  for (u32 w = 0; w < WARPS; ++w) {
    if (w < thread / 32) at += of_warp[w];
    all += of_warp[w];
  }
  for (u32 r = begin; r < end; ++r) {
    starts[r] = static_cast<u32>(at);
    at += seen_tiles(lengths_R[r], window);
    if (!completes(r)) continue;
    lent.blocks[at >> 32] = static_cast<u64>(slots_R[r]) / block_tokens;
    lent.requests[at >> 32] = r;
    at += 1ull << 32;
  }
  lent.count = static_cast<u32>(all >> 32);
  if (thread == 0) starts[requests] = static_cast<u32>(all);
  if (thread < (4 - lent.count % 4) % 4) lent.blocks[lent.count + thread] = EVERY;
  __syncthreads();
}

// The request that a tile belongs to: the last r with starts[r] <= tile (those without tiles stand before it).
DEVICE u32 request_of(u32 tile, const u32* starts, u32 requests) {
  u32 low = 0, high = requests;  // starts[low] <= tile < starts[high]
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (starts[middle] <= tile) low = middle;
    else high = middle;
  }
  return low;
}

// Up to 32 tiles of one request; each lane knows where one of them begins.
struct TileRun {
  u32 request, first, count;  // `first`: of the tiles that the request sees
  u64 offset;
  bool lent;  // the tile ends a lent block
};

// Fetches the tiles of a share one after the other, up to STAGES ahead of where they are used, short of the newest token.
struct Fetcher {
  const Cache& cache;
  const int* lengths_R;
  const u32* starts;
  const Lent& lent;
  u32 window;
  u32 next, end;  // tiles that no run has yet
  TileRun now, later;
  u32 taken = 0;
  const u8* from;  // the thread's chunk of the first token that it copies, one of each PASS
  u32 k_to[K_TURNS], v_to[V_TURNS];

  DEVICE Fetcher(const Cache& cache_, const int* lengths, const u32* starts_, const Lent& lent_, u32 window_, u32 requests,
                 u32 begin, u32 end_, u32 head)
      : cache(cache_), lengths_R(lengths), starts(starts_), lent(lent_), window(window_), next(begin), end(end_) {
    const u32 lane = threadIdx.x % 32, token = lane / CHUNKS, chunk = lane % CHUNKS;
    from = cache.bytes + static_cast<u64>(head) * cache.head_stride + token * cache.token_stride + chunk * 16;
#pragma unroll
    for (u32 turn = 0; turn < K_TURNS; ++turn) k_to[turn] = token * ROW + k_chunk(turn * PASS + token, chunk) * 16;
#pragma unroll
    for (u32 turn = 0; turn < V_TURNS; ++turn)
      v_to[turn] = SIDE_BYTES + token * ROW + v_chunk(turn * PASS + token, chunk) * 16;
    later.request = request_of(begin, starts, requests);
    later = next_run(later.request);
    now = later;
    later = next_run(now.request);
  }

  DEVICE TileRun next_run(u32 request) {
    TileRun found{request, 0, 0, 0, false};
    if (next >= end) return found;
    while (starts[found.request + 1] <= next) ++found.request;
    found.first = next - starts[found.request];
    found.count = min(32u, min(starts[found.request + 1], end) - next);
    next += found.count;
    const u32 lane = threadIdx.x % 32;
    if (lane < found.count) {
      const u32 passed = passed_tiles(lengths_R[found.request], window);
      const u32 token = (passed + found.first + lane) * TILE, inside = token % cache.block_tokens, id = block_of(found.request, token);
      found.offset = static_cast<u64>(id) * cache.block_stride + inside * cache.token_stride;
      const bool newest = starts[found.request] + found.first + lane + 1 == starts[found.request + 1];
      found.lent = !newest && inside + TILE == cache.block_tokens && lent.has(id);
    }
    return found;
  }

  DEVICE u32 block_of(u32 request, u32 token) const {
    return __ldg(cache.table_RB + request * cache.table_stride + token / cache.block_tokens);
  }

  // Whether the tile's last token is another request's new one.
  DEVICE bool fetch(u32 stage) {
    const u64 offset = __shfl_sync(EVERY, now.offset, taken);
    const bool is_lent = __shfl_sync(EVERY, now.lent, taken);
    const u32 tokens = lengths_R[now.request], before = (passed_tiles(tokens, window) + now.first + taken) * TILE;
    const u32 older = tokens - before - 1, token = threadIdx.x % 32 / CHUNKS;
    const bool has = HEAD == DIM || threadIdx.x % CHUNKS < HEAD_BYTES / 16;
    const u8* k = from + offset;
#pragma unroll
    for (u32 i = 0; i < TILE / PASS; ++i, k += PASS * cache.token_stride) {
      const u32 row = i * PASS + token;
      const bool there = has && row < older && (!WINDOWED || row + window > older);
      copy_16(stage + k_to[i % K_TURNS] + i * PASS * ROW, k, there);
      copy_16(stage + v_to[i % V_TURNS] + i * PASS * ROW, k + HEAD_BYTES, there);
    }
    if (++taken == now.count) {
      now = later, taken = 0;
      later = next_run(now.request);
    }
    return is_lent;
  }
};

// The queries of one KV head, as the N side of the product with K: thread (g, t) has head g, of each 64 bytes of it the 16
// from 16t on, as pairs of what the tensor cores take.
struct Query {
  u32 pairs[SIDES][DIM / 8];

  DEVICE void load(const u8* heads) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 side = 0; side < SIDES; ++side)
#pragma unroll
      for (u32 quarter = 0; quarter < QUARTERS; ++quarter) {
        uint4 found{};
        if (side * 8 + g < GROUP && (HEAD == DIM || quarter * 64 + t * 16 < HEAD_BYTES))
          found = *reinterpret_cast<const uint4*>(heads + (side * 8 + g) * HEAD_BYTES + quarter * 64 + t * 16);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          if constexpr (BYTES == 1) {
            pairs[side][quarter * 8 + i * 2] = low_halves(word(found, i));
            pairs[side][quarter * 8 + i * 2 + 1] = high_halves(word(found, i));
          } else {
            pairs[side][quarter * 4 + i] = word(found, i);
          }
        }
      }
  }
};

// What is known of one request so far. Thread (g, t) has of heads 2t and 2t + 1 (of each 8) OWN dimensions from OWN g on, and
// of the sums of weights those of tokens g and g + 8 of every tile.
struct Sums {
  float numerators[SIDES][OWN / 2][4];
  float largest[SIDES][2], weights[SIDES][2];

  DEVICE void clear() {
#pragma unroll
    for (u32 side = 0; side < SIDES; ++side) {
#pragma unroll
      for (u32 i = 0; i < OWN * 2; ++i) numerators[side][i / 4][i % 4] = 0;
#pragma unroll
      for (u32 i = 0; i < 2; ++i) largest[side][i] = -1e30f, weights[side][i] = 0;
    }
  }

  // One tile; `left`: tokens of the request from its first on. `cap`: of scores in powers of two, whose scale is then of
  // twice the score in parts of the cap.
  DEVICE void add(u32 stage, const Query& query, float scale, float cap, u32 left, u32 window) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float scores[SIDES][4] = {};
    constexpr u32 LOADED = QUARTERS < 4 ? QUARTERS : 4;  // at once
    uint4 k[2][LOADED];
#pragma unroll
    for (u32 quarter = 0; quarter < QUARTERS; ++quarter) {
      if (quarter % LOADED == 0)
#pragma unroll
        for (u32 i = 0; i < 2 * LOADED; ++i)  // tokens g and g + 8, of every four chunks t
          k[i / LOADED][i % LOADED] =
              load_16(stage + g * ROW + k_chunk(g, t + (quarter + i % LOADED) * 4) * 16 + i / LOADED * 8 * ROW);
      const uint4 &one = k[0][quarter % LOADED], &other = k[1][quarter % LOADED];
#pragma unroll
      for (u32 i = 0; i < 4 / BYTES; ++i) {
        u32 a0, a1, a2, a3;
        if constexpr (BYTES == 1) {
          const u32 near = word(one, i), far = word(other, i);
          a0 = low_halves(near), a1 = low_halves(far), a2 = high_halves(near), a3 = high_halves(far);
        } else {
          a0 = word(one, i * 2), a1 = word(other, i * 2), a2 = word(one, i * 2 + 1), a3 = word(other, i * 2 + 1);
        }
        const u32 pair = (quarter * (4 / BYTES) + i) * 2;
#pragma unroll
        for (u32 side = 0; side < SIDES; ++side)
          multiply(scores[side], a0, a1, a2, a3, query.pairs[side][pair], query.pairs[side][pair + 1]);
      }
    }
    u32 near[SIDES], far[SIDES];
#pragma unroll
    for (u32 side = 0; side < SIDES; ++side) {
      float(&s)[4] = scores[side];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 token = g + i / 2 * 8;
        s[i] *= scale;
        if constexpr (CAPPED) s[i] = cap - 2 * cap * inverse_of(exp2_of(s[i]) + 1);
        if (token >= left || (WINDOWED && token + window < left)) s[i] = -1e30f;
      }
      float most[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        most[i] = fmaxf(most[i], __shfl_xor_sync(EVERY, most[i], 4));
        most[i] = fmaxf(most[i], __shfl_xor_sync(EVERY, most[i], 8));
        most[i] = fmaxf(most[i], __shfl_xor_sync(EVERY, most[i], 16));
      }
      if (__any_sync(EVERY, most[0] > largest[side][0] || most[1] > largest[side][1])) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          const float raised = fmaxf(most[i], largest[side][i]), shrink = exp2_of(largest[side][i] - raised);
          largest[side][i] = raised;
          weights[side][i] *= shrink;
#pragma unroll
          for (u32 j = 0; j < OWN / 2; ++j) numerators[side][j][i] *= shrink, numerators[side][j][i + 2] *= shrink;
        }
      }
#pragma unroll
      for (u32 i = 0; i < 4; ++i) s[i] = exp2_of(s[i] - largest[side][i % 2]);
      weights[side][0] += s[0] + s[2];
      weights[side][1] += s[1] + s[3];
      near[side] = transposed(pack_weights(s[0], s[1]));
      far[side] = transposed(pack_weights(s[2], s[3]));
    }
    constexpr u32 LOADED_V = OWN_CHUNKS < 2 ? 1 : 2;                // chunks of a token at once
    constexpr u32 EACH = OWN / 2 < 8 / BYTES ? OWN / 2 : 8 / BYTES;  // products with a chunk
    uint4 v[LOADED_V][4];
#pragma unroll
    for (u32 i = 0; i < OWN / 2; ++i) {  // two dimensions of two tokens, a dimension's tokens side by side
      if (i % (EACH * LOADED_V) == 0)
#pragma unroll
        for (u32 j = 0; j < 4 * LOADED_V; ++j)  // tokens 2t, 2t + 1, 2t + 8, 2t + 9, the chunks of the thread's dimensions
          v[j / 4][j % 4] = load_own(stage + SIDE_BYTES, j % 2 + j % 4 / 2 * 8, i / EACH + j / 4);
      const uint4(&part)[4] = v[i / EACH % LOADED_V];
      u32 a0, a1, a2, a3;
      if constexpr (BYTES == 1) {
        const u32 order = i % 2 ? 0x7362 : 0x5140, at = i % EACH / 2;
        const u32 first = __byte_perm(word(part[0], at), word(part[1], at), order);
        const u32 second = __byte_perm(word(part[2], at), word(part[3], at), order);
        a0 = low_halves(first), a1 = high_halves(first), a2 = low_halves(second), a3 = high_halves(second);
      } else {
        const u32 at = i % EACH;
        const u32 w0 = word(part[0], at), w1 = word(part[1], at), w2 = word(part[2], at), w3 = word(part[3], at);
        a0 = __byte_perm(w0, w1, 0x5410), a1 = __byte_perm(w0, w1, 0x7632);
        a2 = __byte_perm(w2, w3, 0x5410), a3 = __byte_perm(w2, w3, 0x7632);
      }
#pragma unroll
      for (u32 side = 0; side < SIDES; ++side) multiply(numerators[side][i], a0, a1, a2, a3, near[side], far[side]);
    }
  }

  // The `chunk`-th of the thread's chunks of V, or its half of one, of the token that many behind 2t.
  DEVICE static uint4 load_own(u32 values, u32 behind, u32 chunk) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (OWN * BYTES < 16)
      return load_8(values + (2 * t + behind) * ROW + v_chunk(2 * t + behind, g / 2) * 16 + g % 2 * 8);
    else
      return load_16(values + 2 * t * ROW + v_chunk(2 * t, g * OWN_CHUNKS + chunk) * 16 + behind * ROW);
  }

  DEVICE void add_up_weights() {
#pragma unroll
    for (u32 side = 0; side < SIDES; ++side)
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        float& sum = weights[side][i];
        sum += __shfl_xor_sync(EVERY, sum, 4);
        sum += __shfl_xor_sync(EVERY, sum, 8);
        sum += __shfl_xor_sync(EVERY, sum, 16);
      }
  }
};

// What joins the cache: BF16 rows of one token's KV heads, and where in the cache they go, or less than 0; nowhere without
// `slots_R`.
struct Fresh {
  const bf16* k_RGD;
  const bf16* v_RGD;
  u64 k_stride, v_stride;
  const long long* slots_R;
};

// Each thread has 4 dimensions of K and V in a round, if there are so many.
struct NewToken {
  uint2 k[ROUNDS], v[ROUNDS];
  long long slot;

  DEVICE static bool has() { return HEAD >= 128 || threadIdx.x % 32 * 4 < HEAD; }

  DEVICE void load(const Fresh& fresh, u32 request, u32 head) {
    if (has())
#pragma unroll
      for (u32 i = 0; i < ROUNDS; ++i) {
        const u32 at = head * HEAD + i * 128 + threadIdx.x % 32 * 4;
        k[i] = *reinterpret_cast<const uint2*>(fresh.k_RGD + request * fresh.k_stride + at);
        v[i] = *reinterpret_cast<const uint2*>(fresh.v_RGD + request * fresh.v_stride + at);
      }
    slot = fresh.slots_R ? fresh.slots_R[request] : -1;
  }

  // As the cache has them: 4 * BYTES bytes of K and of V in a round.
  DEVICE void quantize(float k_by, float v_by) {
    if constexpr (BYTES == 1)
#pragma unroll
      for (u32 i = 0; i < ROUNDS; ++i) {
        k[i].x = quantized(four_bf16(k[i]), k_by);
        v[i].x = quantized(four_bf16(v[i]), v_by);
      }
  }

  // Into a tile, at `row`.
  DEVICE void join(u32 stage, u32 row) const {
    constexpr u32 MANY = 4 / BYTES;  // threads to a chunk
    const u32 lane = threadIdx.x % 32, inside = lane % MANY * (4 * BYTES);
    if (has())
#pragma unroll
      for (u32 i = 0; i < ROUNDS; ++i) {
        const u32 chunk = i * (32 / MANY) + lane / MANY;
        const u32 k_to = stage + row * ROW + k_chunk(row, chunk) * 16 + inside;
        const u32 v_to = stage + SIDE_BYTES + row * ROW + v_chunk(row, chunk) * 16 + inside;
        if constexpr (BYTES == 1) {
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(k_to), "r"(k[i].x) : "memory");
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(v_to), "r"(v[i].x) : "memory");
        } else {
          asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(k_to), "r"(k[i].x), "r"(k[i].y) : "memory");
          asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(v_to), "r"(v[i].x), "r"(v[i].y) : "memory");
        }
      }
    __syncwarp();
  }

  DEVICE void store(const Cache& cache, u32 head) const {
    if (slot < 0 || !has()) return;
    const u32 lane = threadIdx.x % 32;
    const u64 block = static_cast<u64>(slot) / cache.block_tokens;
    const u32 inside = static_cast<u64>(slot) - block * cache.block_tokens;
    u8* to = cache.bytes + block * cache.block_stride + inside * cache.token_stride +
             static_cast<u64>(head) * cache.head_stride + lane * (4 * BYTES);
#pragma unroll
    for (u32 i = 0; i < ROUNDS; ++i, to += 128 * BYTES)
      if constexpr (BYTES == 1) {
        *reinterpret_cast<u32*>(to) = k[i].x;
        *reinterpret_cast<u32*>(to + HEAD_BYTES) = v[i].x;
      } else {
        *reinterpret_cast<uint2*>(to) = k[i];
        *reinterpret_cast<uint2*>(to + HEAD_BYTES) = v[i];
      }
  }
};

// Where outputs go: BF16 rows of heads, or, if there are `codes_RHD`, codes, and scales `scale_stride` apart from block to
// block.
struct Out {
  bf16* values_RHD;
  u64 stride;
  u8* codes_RHD;
  float* scales_BR;
  u64 scale_stride;
  u32 pow2;

  // Of one request the calling thread's PAIRS neighbouring pairs of BF16 of COUNT neighbouring heads, from a column of the
  // first one on. All of a block are in threads of one warp whose numbers differ in the bits of `apart`, of which it takes
  // part with `threads`.
  template <u32 COUNT, u32 PAIRS>
  DEVICE void put(u32 request, u32 column, const u32 (&pairs)[COUNT][PAIRS], u32 threads, u32 apart) const {
    if (HEAD == 96 || !codes_RHD) {
#pragma unroll
      for (u32 head = 0; head < COUNT; ++head)
        write(reinterpret_cast<u32*>(values_RHD + request * stride + column + head * HEAD), pairs[head]);
      return;
    }
    u32 amax = 0;
#pragma unroll
    for (u32 i = 0; i < COUNT * PAIRS; ++i) amax = larger(amax, pairs[i / PAIRS][i % PAIRS] & 0x7FFF7FFFu);
#pragma unroll
    for (u32 bit = 1; bit < 32; bit *= 2)
      if (apart & bit) amax = larger(amax, __shfl_xor_sync(threads, amax, bit));
    const float scale = scale_of(max(amax & 0xFFFFu, amax >> 16) << 16, pow2), inverse = __frcp_rn(scale);
#pragma unroll
    for (u32 head = 0; head < COUNT; ++head) {
      u32 codes[PAIRS / 2];
#pragma unroll
      for (u32 i = 0; i < PAIRS / 2; ++i)
        codes[i] = codes_of(pairs[head][2 * i], pairs[head][2 * i + 1], scale, inverse, pow2);
      write(reinterpret_cast<u32*>(codes_RHD + static_cast<u64>(request) * (HEADS * HEAD) + column + head * HEAD), codes);
    }
    if (column % BLOCK == 0) scales_BR[column / BLOCK * scale_stride + request] = scale;
  }

  template <u32 WORDS>
  DEVICE static void write(u32* to, const u32 (&words)[WORDS]) {
    if constexpr (WORDS == 1) *to = words[0];
    else if constexpr (WORDS == 2) *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    else
#pragma unroll
      for (u32 i = 0; i < WORDS; i += 4)
        *reinterpret_cast<uint4*>(to + i) = {words[i], words[i + 1], words[i + 2], words[i + 3]};
  }
};

// The score of a query head's sink, in powers of two.
DEVICE float sink_of(const Options& options, u32 query_head) {
  return __uint_as_float(static_cast<u32>(options.sinks_H[query_head]) << 16) * 1.4426950408889634f;
}

// What `factor` over a sum of weights is with the sink's weight; `largest`: the score that has a weight of 1.
DEVICE float over_weights(float factor, float weights, float largest, const Options& options, u32 query_head) {
  if constexpr (!SINKS) return factor / weights;
  const float sink = sink_of(options, query_head), raised = fmaxf(largest, sink), shrink = exp2_of(largest - raised);
  return factor * shrink / (weights * shrink + exp2_of(sink - raised));
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    decode_attention(const u8* query_RHD, u64 query_stride, Fresh fresh, Cache cache, const int* lengths_R, u32 requests,
                     const float* q_scale, const float* k_scale, const float* v_scale, u32 scale_stride, float softmax_scale,
                     Out out, float* parts_SHD, float2* part_sums_SH, u32 shares, Options options) {
  extern __shared__ __align__(128) u8 shared[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // combine_attention waits beside this
  u64* of_warp = reinterpret_cast<u64*>(shared + WARPS * STAGES * STAGE_BYTES);
  const u32 room = (requests + 3) / 4 * 4;
  Lent lent{reinterpret_cast<u32*>(of_warp + (WARPS + 1) / 2 * 2)};
  lent.requests = lent.blocks + room;
  u32* starts = lent.requests + room;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  constexpr u32 ACROSS = KV_HEADS / TOGETHER;
  const u32 head = blockIdx.x % ACROSS * TOGETHER + warp % TOGETHER;
  const u32 share = blockIdx.x / ACROSS * SHARES + warp / TOGETHER;

  lay_end_to_end(lengths_R, options.window, fresh.slots_R, cache.block_tokens, requests, starts, lent, of_warp);
  const u32 all = starts[requests], used = min(shares, all);  // no share is empty, so a request's parts lie side by side
  const u32 begin = share < used ? static_cast<u64>(all) * share / used : all;
  const u32 end = share < used ? static_cast<u64>(all) * (share + 1) / used : all;
  const u32 count = end - begin;
  const u32 ring = shared_address(shared) + warp * (STAGES * STAGE_BYTES);
  Fetcher fetcher(cache, lengths_R, starts, lent, options.window, requests, begin, end, head);
  u32 borrowing = 0;  // stages whose last token is still to come, a bit each
  for (u32 i = 0; i < STAGES - 1; ++i) {
    if (i < count) borrowing |= fetcher.fetch(ring + i * STAGE_BYTES) << i;
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  const float k_by = k_scale[head * scale_stride], v_by = v_scale[head * scale_stride];
  float scale = softmax_scale * 1.4426950408889634f * q_scale[head * scale_stride] * k_by, cap = 0;
  if constexpr (CAPPED) scale *= 2 / options.cap, cap = options.cap * 1.4426950408889634f;
  asm volatile("griddepcontrol.wait;" ::: "memory");

  Query query;
  NewToken newest{};
  Sums sums;
  u32 request = count ? request_of(begin, starts, requests) : 0, tile = count ? begin - starts[request] : 0;
  u32 stage = 0, into = STAGES - 1;
  for (u32 i = 0; i < count;) {
    const u32 first = starts[request], upto = starts[request + 1];
    const u32 stop = min(end, upto) - first, tokens = lengths_R[request], passed = passed_tiles(tokens, options.window);
    query.load(query_RHD + request * query_stride + head * (GROUP * HEAD_BYTES));
    if (upto <= end) newest.load(fresh, request, head);
    sums.clear();
#pragma unroll 1
    for (; tile < stop; ++tile, ++i) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
      __syncwarp();  // this tile is there, and every thread is done with the one before it
      if (i + STAGES - 1 < count) borrowing |= fetcher.fetch(ring + into * STAGE_BYTES) << into;
      asm volatile("cp.async.commit_group;" ::: "memory");
      const u32 at = ring + stage * STAGE_BYTES;
      if (first + tile + 1 == upto) {
        newest.quantize(k_by, v_by);
        newest.join(at, (tokens - 1) % TILE);
        newest.store(cache, head);
      }
      if (borrowing >> stage & 1) {
        borrowing ^= 1u << stage;
        NewToken last;
        last.load(fresh, lent.lender(fetcher.block_of(request, (passed + tile) * TILE)), head);
        last.quantize(k_by, v_by);
        last.join(at, TILE - 1);
      }
      sums.add(at, query, scale, cap, tokens - (passed + tile) * TILE, options.window);
      if (++stage == STAGES) stage = 0;
      if (++into == STAGES) into = 0;
    }
    sums.add_up_weights();
    const bool whole = begin <= first && upto <= end;
#pragma unroll
    for (u32 side = 0; side < SIDES; ++side)
#pragma unroll
      for (u32 j = 0; j < 2; j += TOGETHER_OUT) {
        const u32 of_group = side * 8 + 2 * t + j;
        if (of_group >= GROUP || (HEAD < DIM && g * OWN >= HEAD)) continue;
        const u32 query_head = head * GROUP + of_group;
        float(&n)[OWN / 2][4] = sums.numerators[side];
        if (whole) {
          u32 pairs[TOGETHER_OUT][OWN / 2];
#pragma unroll
          for (u32 k = 0; k < TOGETHER_OUT; ++k) {
            const float by =
                over_weights(v_by, sums.weights[side][j + k], sums.largest[side][j + k], options, query_head + k);
#pragma unroll
            for (u32 p = 0; p < OWN / 2; ++p) pairs[k][p] = pack_bf16(n[p][j + k] * by, n[p][j + k + 2] * by);
          }
          constexpr u32 APART = HEAD == 256 ? 4 | 8 : 4 | 8 | 16;
          out.put(request, query_head * HEAD + g * OWN, pairs, (HEAD == 256 ? 0x1111u << g / 4 * 16 : 0x11111111u) << t, APART);
        } else {
#pragma unroll
          for (u32 k = j; k < j + TOGETHER_OUT; ++k) {
            const u64 at = static_cast<u64>(share + request) * HEADS + query_head + k - j;
            float4* to = reinterpret_cast<float4*>(parts_SHD + at * DIM + g * OWN);
#pragma unroll
            for (u32 p = 0; p < OWN / 4; ++p) to[p] = {n[p * 2][k], n[p * 2][k + 2], n[p * 2 + 1][k], n[p * 2 + 1][k + 2]};
            if (g == 0) part_sums_SH[at] = {sums.largest[side][k], sums.weights[side][k]};
          }
        }
      }
    tile = 0;
    if (i < count)
      do ++request;
      while (starts[request + 1] == starts[request]);
  }
}

// Adds up the parts of requests that more than one share had a part of; `spread` warps (a divisor of a block's) take BLOCK
// columns of one request, each neighbouring parts. Requests without tokens (padding of a batch) become zeros.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine_attention(const float* parts_SHD, const float2* part_sums_SH, const int* lengths_R, u32 requests,
                      const float* v_scale, u32 scale_stride, Out out, u32 shares, u32 spread, Options options) {
  extern __shared__ __align__(128) u8 shared[];
  u64* of_warp = reinterpret_cast<u64*>(shared);
  float4* sums = reinterpret_cast<float4*>(shared + 128);  // [WARPS, 32]
  constexpr u32 OF_BLOCK = DIM < BLOCK ? BLOCK / DIM : 1;  // heads
  float2* told = reinterpret_cast<float2*>(sums + WARPS * 32);  // [WARPS, OF_BLOCK]
  u32* starts = reinterpret_cast<u32*>(told + WARPS * OF_BLOCK);
  Lent none{};
  if (requests >= EARLY_REQUESTS) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  lay_end_to_end(lengths_R, options.window, nullptr, 0, requests, starts, none, of_warp);
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 item = blockIdx.x * (WARPS / spread) + warp / spread, member = warp % spread;
  constexpr u32 BLOCKS = (HEADS * DIM + BLOCK - 1) / BLOCK;  // the last may be half of one
  const u32 request = min(item / BLOCKS, requests - 1), column = item % BLOCKS * BLOCK + lane * 4, head = column / DIM;
  const bool has = HEADS * DIM % BLOCK == 0 || head < HEADS;
  const u32 first = starts[request], upto = starts[request + 1], all = starts[requests];
  const u64 used = min(shares, all);
  u32 from = 0, count = 0;
  if (first < upto) {
    from = ((first + 1) * used - 1) / all;  // shares of the first tile and of the last
    count = static_cast<u32>((upto * used - 1) / all) - from + 1;
  }
  const u32 each = (count + spread - 1) / spread, begin = min(count, member * each), end = min(count, begin + each);
  const u64 at = static_cast<u64>(from + request) * HEADS;
  float largest = -1e30f, weights = 0;
  float4 sum{};
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (count > 1)
    for (u32 i = begin; i < end; i += PARTS) {
      float4 part[PARTS];
      float2 own[PARTS];
#pragma unroll
      for (u32 j = 0; j < PARTS; ++j) {
        if (i + j >= end || !has) continue;
        const u64 row = at + (i + j) * HEADS;
        part[j] = *reinterpret_cast<const float4*>(parts_SHD + row * DIM + column);
        own[j] = part_sums_SH[row + head];
      }
#pragma unroll
      for (u32 j = 0; j < PARTS; ++j) {
        if (i + j >= end) continue;
        const float raised = fmaxf(largest, own[j].x), old = exp2_of(largest - raised), by = exp2_of(own[j].x - raised);
        weights = weights * old + own[j].y * by;
        sum = {sum.x * old + part[j].x * by, sum.y * old + part[j].y * by, sum.z * old + part[j].z * by,
               sum.w * old + part[j].w * by};
        largest = raised;
      }
    }
  if (spread > 1) {
    sums[threadIdx.x] = sum;
    if (lane % (32 / OF_BLOCK) == 0) told[threadIdx.x / (32 / OF_BLOCK)] = {largest, weights};
    __syncthreads();
    if (member) return;
    for (u32 j = 1; j < spread; ++j) {
      const float2 own = told[threadIdx.x / (32 / OF_BLOCK) + j * OF_BLOCK];
      const float4 part = sums[threadIdx.x + j * 32];
      const float raised = fmaxf(largest, own.x), old = exp2_of(largest - raised), by = exp2_of(own.x - raised);
      weights = weights * old + own.y * by;
      sum = {sum.x * old + part.x * by, sum.y * old + part.y * by, sum.z * old + part.z * by, sum.w * old + part.w * by};
      largest = raised;
    }
  }
  if (item >= requests * BLOCKS || count == 1 || !has || column % DIM >= HEAD) return;
  const float by = count ? over_weights(v_scale[head / GROUP * scale_stride], weights, largest, options, head) : 0;
  const u32 pairs[1][2] = {{pack_bf16(sum.x * by, sum.y * by), pack_bf16(sum.z * by, sum.w * by)}};
  out.put(request, head * HEAD + column % DIM, pairs, EVERY, 31);
}
