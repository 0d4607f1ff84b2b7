// Sampling of tokens, one thread block for each row. The kernel follows sample.rs and
// its order of additions, so that a sample is the same on any device. Only the sums of
// top_p differ: they are multiples of 2^-41, so the order in which threads add them
// does not matter.
#include "kernels.h"

constexpr u32 SAMPLE_THREADS = 1024;
constexpr u32 SUM_CHUNK = 256;
constexpr u32 SUM_LANES = 8;
constexpr u32 BUCKETS = 1024;
constexpr float LEAST_TEMPERATURE = 1e-5f;
constexpr float LEAST_LOGPROB = -9999.0f;
constexpr double WHOLE = 2199023255552.0; // 2^41: 2^22 weights of 1 fit in 64 bits

struct SampleShared {
    // The mass of each bucket, as two words.
    u32 low[BUCKETS], high[BUCKETS];
    double lanes[SAMPLE_THREADS];
    u64 keys[SAMPLE_THREADS / WARP];
    u64 lane_mass[WARP];
    u64 list[SAMPLE_THREADS];
    u64 above;
    double wanted;
    u32 warps[SAMPLE_THREADS / WARP];
    u32 bucket, token, chunk, found, prompted, equal, listed;
};

DEVICE bool is_number(float x) { return x == x; }
DEVICE float largest_number() { return float_of(0x7f7fffffu); }
// Returns the logit, or the largest number for infinity.
DEVICE float bounded(float logit) { return logit > largest_number() ? largest_number() : logit; }

// Returns a key that orders tokens by logit and then by smaller id.
DEVICE u64 key_of(float logit, u32 token) {
    float value = is_number(logit) ? plus(logit, 0.0f) : minus_infinity(); // turns -0 into 0
    u32 bits = bits_of(value);
    u32 order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)order << 32 | (NONE - token);
}
DEVICE u32 token_of(u64 key) { return NONE - (u32)key; }
DEVICE float logit_of(u64 key) {
    u32 order = (u32)(key >> 32);
    return float_of(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Shows some of a thread's share of a row, starting at `start`. All loads start before
// the first value is used, because waiting for memory is most of the work.
constexpr u32 AT_ONCE = 8;
template <bool ARE_ALL_THERE, class Look>
DEVICE void show(const float* row, u32 start, u32 count, Look look) {
    float values[AT_ONCE];
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++) {
        u32 i = start + k * SAMPLE_THREADS;
        values[k] = ARE_ALL_THERE || i < count ? row[i] : 0.0f;
    }
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++) {
        u32 i = start + k * SAMPLE_THREADS;
        if (ARE_ALL_THERE || i < count) {
            look(i, values[k]);
        }
    }
}
// Shows a thread its share of a row, in order of tokens.
template <class Look> DEVICE void each(const float* row, u32 count, Look look) {
    u32 start = thread_index();
    for (; start + (AT_ONCE - 1) * SAMPLE_THREADS < count; start += AT_ONCE * SAMPLE_THREADS) {
        show<true>(row, start, count, look);
    }
    show<false>(row, start, count, look);
}

// Returns the largest of all threads' keys, to all threads.
DEVICE u64 largest_key(SampleShared& shared, u64 key) {
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) {
        key = most_of(key, shuffle_xor(key, mask));
    }
    sync_block(); // all threads have read the previous keys
    if (thread_index() % WARP == 0) {
        shared.keys[thread_index() / WARP] = key;
    }
    sync_block();
    for (u32 warp = 0; warp < SAMPLE_THREADS / WARP; warp++) {
        key = most_of(key, shared.keys[warp]);
    }
    return key;
}

// Returns the largest key below `before`.
DEVICE u64 likeliest(SampleShared& shared, const float* logits, u32 count, u64 before) {
    u64 best = 0;
    for (u32 i = thread_index(); i < count; i += SAMPLE_THREADS) {
        u64 key = key_of(logits[i], i);
        best = key < before ? most_of(best, key) : best;
    }
    return largest_key(shared, best);
}
// Returns the largest key of a row, or nothing if no logit is above -inf. A greedy
// sample is only this search, and the search waits for memory: each load has 16 bytes,
// and four are under way.
DEVICE u64 likeliest(SampleShared& shared, const float* logits, u32 count) {
    constexpr u32 LOADS = 4;
    if (count % 4 != 0) { // not every row begins at 16 bytes
        return likeliest(shared, logits, count, ~0ull);
    }
    float highest = minus_infinity();
    u32 token = NONE;
    for (u32 start = 4 * thread_index(); start < count; start += LOADS * 4 * SAMPLE_THREADS) {
        Floats4 values[LOADS];
#pragma unroll
        for (u32 k = 0; k < LOADS; k++) {
            u32 i = start + k * 4 * SAMPLE_THREADS;
            values[k] = Floats4{{highest, highest, highest, highest}};
            if (i < count) {
                values[k] = *reinterpret_cast<const Floats4*>(logits + i);
            }
        }
#pragma unroll
        for (u32 k = 0; k < LOADS; k++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                // The first of equal logits stays, and a comparison with NaN is false.
                if (values[k].at[j] > highest) {
                    highest = values[k].at[j];
                    token = start + k * 4 * SAMPLE_THREADS + j;
                }
            }
        }
    }
    return largest_key(shared, token == NONE ? 0 : key_of(highest, token));
}
DEVICE bool is_nothing(u64 key) { return key == 0 || logit_of(key) == minus_infinity(); }

// Returns e^x for x up to 0, bit for bit as exponential.rs computes it.
DEVICE float exponential(float x) {
    const float ROUND = 12582912.0f, LN2_HIGH = 355.0f / 512.0f, LN2_LOW = -2.1219444e-4f;
    float shifted = plus(times(x, 1.44269504f), ROUND);
    float whole = plus(shifted, -ROUND);
    float r = plus(plus(x, -times(whole, LN2_HIGH)), -times(whole, LN2_LOW));
    float p = 1.9875691e-4f;
    p = plus(times(p, r), 1.3981999e-3f);
    p = plus(times(p, r), 8.333452e-3f);
    p = plus(times(p, r), 4.1665796e-2f);
    p = plus(times(p, r), 1.6666665e-1f);
    p = plus(times(p, r), 0.5f);
    float power = float_of((bits_of(shifted) + 127) << 23);
    // Computed in any case: a branch would keep several calls from overlapping.
    float result = times(plus(plus(times(times(p, r), r), r), 1.0f), power);
    return x > -87.3f ? result : 0.0f;
}

DEVICE u64 mixed(u64 value) {
    value += 0x9e3779b97f4a7c15ull;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}
DEVICE double uniform(u64 seed, u32 position) {
    u64 bits = mixed(mixed(seed) + ((u64)position + 1) * 0x9e3779b97f4a7c15ull);
    return times((double)(bits >> 11), 1.0 / 9007199254740992.0);
}

// Applies the repetition penalty to the logit of an earlier token.
DEVICE float less_repeated(float logit, float repetition) {
    // A penalty below 1 may overflow.
    return bounded(logit > 0 ? divided(logit, repetition) : times(logit, repetition));
}

// Copies the row, leaves out masked tokens, adds biases and subtracts penalties.
DEVICE void adjust(SampleShared& shared, const SampleArgs& args, const SampleRow& row,
                   const float* logits, float* weights) {
    if (thread_index() == 0) {
        shared.found = 0;
        shared.prompted = 0;
    }
    // Neither a bias nor a penalty brings back a token at minus infinity.
    each(logits, args.vocabulary, [&](u32 i, float logit) {
        bool is_allowed = row.mask == NONE || (args.masks[row.mask + i / 32] >> (i % 32) & 1);
        weights[i] = is_allowed ? bounded(logit) : minus_infinity();
    });
    sync_block();
    for (u32 i = thread_index(); i < row.bias_count; i += SAMPLE_THREADS) {
        u32 token = args.bias_tokens[row.biases + i];
        if (token < args.vocabulary) {
            weights[token] = plus(weights[token], args.biases[row.biases + i]);
        }
    }
    if (row.presence == 0 && row.frequency == 0 && row.repetition == 1) {
        return;
    }
    sync_block();
    u32 pending = row.pending == NONE ? NONE : args.previous[row.pending];
    // Empty without a repetition penalty. No token is in it twice, so no two
    // threads change one weight.
    for (u32 i = thread_index(); i < row.prompt_count; i += SAMPLE_THREADS) {
        u32 token = args.prompt_tokens[row.prompt + i];
        if (token == pending) {
            shared.prompted = 1;
        }
        if (token < args.vocabulary) {
            weights[token] = less_repeated(weights[token], row.repetition);
        }
    }
    sync_block(); // a token of the prompt may be among the counts, too
    for (u32 i = thread_index(); i < row.count_count; i += SAMPLE_THREADS) {
        u32 token = args.count_tokens[row.counts + i], count = args.counts[row.counts + i];
        bool is_prompted = count & PROMPTED;
        count &= ~PROMPTED;
        if (token == pending) {
            count++;
            shared.found = 1;
        }
        if (token < args.vocabulary) {
            float weight = weights[token];
            weight = is_prompted ? weight : less_repeated(weight, row.repetition);
            float penalty = plus(row.presence, times(row.frequency, (float)count));
            weights[token] = plus(weight, -penalty);
        }
    }
    sync_block();
    if (thread_index() == 0 && shared.found == 0 && pending < args.vocabulary) {
        float weight = weights[pending];
        weight = shared.prompted ? weight : less_repeated(weight, row.repetition);
        weights[pending] = plus(weight, -plus(row.presence, row.frequency));
    }
}

// The part of a row that is kept: `most` tokens if that is not 0, otherwise the tokens
// that together reach `part` of all weights.
struct Kept {
    u32 most;
    float part;
};
// Returns the mass that one token adds.
DEVICE u64 mass_of(float weight, Kept kept) {
    if (kept.most > 0) {
        return weight > 0 ? 1 : 0;
    }
    return (u64)times((double)weight, WHOLE);
}
// Returns the mass that the kept tokens must reach, of the mass `all`.
DEVICE double wanted_of(u64 all, Kept kept) {
    return kept.most > 0 ? (double)least_of((u64)kept.most, all)
                         : times((double)kept.part, (double)all);
}

DEVICE u64 mass_in(const SampleShared& shared, u32 bucket) {
    return (u64)shared.high[bucket] << 32 | shared.low[bucket];
}

// Finds the highest bucket at which the summed mass reaches the wanted mass. The first
// thread searches; `above` becomes the mass above that bucket. The first call computes
// the wanted mass.
DEVICE void descend(SampleShared& shared, bool is_first, Kept kept) {
    constexpr u32 SHARE = BUCKETS / WARP;
    if (thread_index() < WARP) {
        u64 sum = 0;
        for (u32 i = 0; i < SHARE; i++) {
            sum += mass_in(shared, thread_index() * SHARE + i);
        }
        shared.lane_mass[thread_index()] = sum;
    }
    sync_block();
    if (thread_index() == 0) {
        if (is_first) {
            u64 total = 0;
            for (u32 i = 0; i < WARP; i++) {
                total += shared.lane_mass[i];
            }
            shared.wanted = wanted_of(total, kept);
        }
        double wanted = shared.wanted;
        u64 above = shared.above;
        u32 share = WARP - 1;
        while (share > 0 && (shared.lane_mass[share] == 0 ||
                             (double)(above + shared.lane_mass[share]) < wanted)) {
            above += shared.lane_mass[share];
            share--;
        }
        u32 bucket = share * SHARE + SHARE - 1;
        while (bucket > share * SHARE && (mass_in(shared, bucket) == 0 ||
                                          (double)(above + mass_in(shared, bucket)) < wanted)) {
            above += mass_in(shared, bucket);
            bucket--;
        }
        shared.above = above;
        shared.bucket = bucket;
    }
    sync_block();
}

// Adds to a bucket of two words. Shared memory adds 32-bit words in hardware, but a
// 64-bit addition would be a loop of retries. A thread that overflows the lower word
// carries into the upper word.
DEVICE void add_mass(SampleShared& shared, u32 bucket, u64 mass) {
    u32 low = (u32)mass, high = (u32)(mass >> 32);
    if (low > 0 && atomic_add(&shared.low[bucket], low) + low < low) {
        high++;
    }
    if (high > 0) {
        atomic_add(&shared.high[bucket], high);
    }
}

// Sums the mass of weights whose bits above `shift` + 10 equal `prefix`, by the ten
// bits below.
DEVICE void count_mass(SampleShared& shared, const float* weights, u32 count, Kept kept,
                       u32 prefix, u32 shift) {
    sync_block();
    for (u32 i = thread_index(); i < BUCKETS; i += SAMPLE_THREADS) {
        shared.low[i] = 0;
        shared.high[i] = 0;
    }
    sync_block();
    each(weights, count, [&](u32, float weight) {
        u32 bits = bits_of(weight) >> shift;
        if (bits >> 10 == prefix) {
            add_mass(shared, bits % BUCKETS, mass_of(weight, kept));
        }
    });
    sync_block();
}

// Keeps the first `most` of the weights with these bits, in order of tokens.
DEVICE void keep_first(SampleShared& shared, float* weights, u32 count, u32 bits, u64 most) {
    u64 kept = 0;
    u32 lane = thread_index() % WARP, warp = thread_index() / WARP;
    for (u32 start = 0; start < count; start += SAMPLE_THREADS) {
        u32 i = start + thread_index();
        bool is_equal = i < count && bits_of(weights[i]) == bits;
        u32 lanes = ballot(is_equal);
        sync_block();
        if (lane == 0) {
            shared.warps[warp] = count_bits(lanes);
        }
        sync_block();
        u64 before = kept + count_bits(lanes & ((1u << lane) - 1));
        for (u32 other = 0; other < SAMPLE_THREADS / WARP; other++) {
            before += other < warp ? shared.warps[other] : 0;
            kept += shared.warps[other];
        }
        if (is_equal && before >= most) {
            weights[i] = 0;
        }
    }
}

// Sets every weight outside the kept part to 0. The likeliest tokens stay, and of equal
// weights those with smaller ids.
DEVICE void cut_tail(SampleShared& shared, float* weights, u32 count, Kept kept) {
    sync_block(); // no thread still reads the results of the last cut
    if (thread_index() == 0) {
        shared.above = 0;
        shared.equal = 0;
    }
    // The highest bits first, then ten bits and ten more, which are all.
    u32 bits = 0;
    for (u32 level = 0; level < 3; level++) {
        count_mass(shared, weights, count, kept, bits, 20 - 10 * level);
        descend(shared, level == 0, kept);
        bits = bits << 10 | shared.bucket;
    }
    // The number of tokens with exactly this weight that are needed.
    double mass = (double)mass_of(float_of(bits), kept);
    double missing = shared.wanted - (double)shared.above;
    u64 most = missing > mass ? (u64)(missing / mass) : 1;
    while (times((double)most, mass) < missing) {
        most++;
    }
    u32 equal = 0;
    each(weights, count, [&](u32 i, float weight) {
        u32 other = bits_of(weight);
        equal += other == bits ? 1 : 0;
        if (other < bits) {
            weights[i] = 0;
        }
    });
    atomic_add(&shared.equal, equal);
    sync_block();
    if (shared.equal > most && !PLANTED(SampleTies)) {
        keep_first(shared, weights, count, bits, most);
    }
}

// Computes the sums of 256 weights each, in eight lanes that are then added in order.
DEVICE void sum_chunks(SampleShared& shared, const float* weights, u32 count, double* sums) {
    constexpr u32 CHUNKS_AT_ONCE = SAMPLE_THREADS / SUM_LANES;
    u32 lane = thread_index() % SUM_LANES;
    u32 chunks = steps_of(count, SUM_CHUNK);
    for (u32 start = 0; start < chunks; start += CHUNKS_AT_ONCE) {
        u32 chunk = start + thread_index() / SUM_LANES;
        u32 first = chunk * SUM_CHUNK;
        u32 length = chunk < chunks ? least_of(SUM_CHUNK, count - first) : 0;
        u32 whole = length / SUM_LANES * SUM_LANES;
        double sum = 0;
        // The additions wait for each other, but not the loads.
#pragma unroll 8
        for (u32 i = lane; i < whole; i += SUM_LANES) {
            sum = plus(sum, (double)weights[first + i]);
        }
        shared.lanes[thread_index()] = sum;
        sync_warp();
        if (lane == 0 && chunk < chunks) {
            double total = 0, rest = 0;
            for (u32 i = 0; i < SUM_LANES; i++) {
                total = plus(total, shared.lanes[thread_index() + i]);
            }
            for (u32 i = whole; i < length; i++) {
                rest = plus(rest, (double)weights[first + i]);
            }
            sums[chunk] = plus(total, rest);
        }
        sync_warp();
    }
}

// Copies up to SAMPLE_THREADS numbers to shared memory, where the first thread reads
// them quickly.
template <typename Number>
DEVICE u32 bring(SampleShared& shared, const Number* from, u32 many) {
    sync_block(); // the first thread has read the previous numbers
    if (thread_index() < many) {
        shared.lanes[thread_index()] = (double)from[thread_index()];
    }
    sync_block();
    return many;
}

// Returns the token at which `part` of all weights is reached, to all threads; `best`
// if rounding leaves a remainder behind the last token. One thread adds in order, and
// the others load its numbers, because waiting for memory takes a hundred times as long
// as an addition.
DEVICE u32 pick(SampleShared& shared, const float* weights, u32 count, const double* sums,
                double part, u32 best) {
    u32 chunks = steps_of(count, SUM_CHUNK);
    double left = 0;
    for (u32 first = 0; first < chunks; first += SAMPLE_THREADS) {
        u32 many = bring(shared, sums + first, least_of(SAMPLE_THREADS, chunks - first));
        for (u32 i = 0; thread_index() == 0 && i < many; i++) {
            left = plus(left, shared.lanes[i]);
        }
        sync_block();
    }
    left = times(part, left);
    if (thread_index() == 0) {
        shared.token = best;
    }
    u32 first = 0, token = NONE;
    while (first < chunks && token == NONE) {
        u32 many = bring(shared, sums + first, least_of(SAMPLE_THREADS, chunks - first));
        if (thread_index() == 0) {
            u32 i = 0;
            while (i < many && left >= shared.lanes[i]) {
                left = plus(left, -shared.lanes[i]);
                i++;
            }
            shared.chunk = i;
        }
        sync_block();
        u32 skipped = shared.chunk;
        first += skipped;
        if (skipped == many) {
            continue;
        }
        u32 start = first * SUM_CHUNK;
        u32 length = bring(shared, weights + start, least_of(SUM_CHUNK, count - start));
        if (thread_index() == 0) {
            shared.chunk = NONE;
            for (u32 i = 0; i < length && shared.chunk == NONE; i++) {
                if (left < shared.lanes[i]) {
                    shared.token = start + i;
                    shared.chunk = i;
                } else {
                    left = plus(left, -shared.lanes[i]);
                }
            }
        }
        sync_block();
        // Rounding may leave a remainder behind a chunk's last token; the search then
        // continues.
        token = shared.chunk;
        first++;
    }
    sync_block();
    return shared.token;
}

// Samples a token and returns it to all threads; NONE if no logit is finite.
DEVICE u32 sample_token(SampleShared& shared, const SampleArgs& args, const SampleRow& row,
                const float* logits) {
    u32 count = args.vocabulary;
    float* weights = args.weights + (u64)block_x() * count;
    double* sums = args.sums + (u64)block_x() * steps_of(count, SUM_CHUNK);
    bool is_greedy = row.temperature < LEAST_TEMPERATURE;
    bool is_plain = row.bias_count == 0 && row.presence == 0 && row.frequency == 0 &&
                    row.repetition == 1 && row.mask == NONE;
    if (!is_plain) {
        adjust(shared, args, row, logits, weights);
        sync_block();
    }
    const float* from = is_plain ? logits : weights;
    u64 key = likeliest(shared, from, count);
    if (is_nothing(key)) {
        return NONE;
    }
    if (is_greedy) {
        return token_of(key);
    }
    float highest = bounded(from[token_of(key)]), scale = divided(1.0f, row.temperature);
    sync_block(); // all threads have read the highest logit before it becomes a weight
    each(from, count, [&](u32 i, float logit) {
        float weight = exponential(times(plus(bounded(logit), -highest), scale));
        weights[i] = weight < row.min_p ? 0.0f : weight; // the likeliest weight is 1
    });
    if (row.top_k > 0 && row.top_k < count) {
        cut_tail(shared, weights, count, Kept{row.top_k, 1.0f});
    }
    if (row.top_p < 1) {
        cut_tail(shared, weights, count, Kept{0, row.top_p});
    }
    if (!PLANTED(SampleWithoutBarrier)) {
        sync_block();
    }
    sum_chunks(shared, weights, count, sums);
    return pick(shared, weights, count, sums, uniform(row.seed, row.position), token_of(key));
}

// Returns the logarithm of the sum of exponentials of the row.
DEVICE double normaliser(SampleShared& shared, const float* logits, u32 count) {
    u64 key = likeliest(shared, logits, count);
    if (is_nothing(key)) {
        return (double)minus_infinity();
    }
    float highest = bounded(logit_of(key));
    double sum = 0;
    for (u32 i = thread_index(); i < count; i += SAMPLE_THREADS) {
        float logit = logits[i] > highest ? highest : logits[i];
        sum += (double)exponential(plus(logit, -highest));
    }
    sum = sum_of_lanes(sum, WARP);
    if (thread_index() % WARP == 0) {
        shared.lanes[thread_index() / WARP] = sum;
    }
    sync_block();
    sum = 0;
    for (u32 warp = 0; warp < SAMPLE_THREADS / WARP; warp++) {
        sum += shared.lanes[warp];
    }
    return (double)highest + natural_log(sum);
}
DEVICE float logprob(float logit, double normaliser) {
    float value = (float)((double)bounded(logit) - normaliser);
    // Written so that NaN becomes the lower bound too.
    return value > LEAST_LOGPROB ? least_of(value, 0.0f) : LEAST_LOGPROB;
}

// Lists every key that can be among the `top` largest. Returns true if the list had
// room for all. Each thread first finds its own largest key. The `top`-th largest of
// these is a bound that at least `top` keys reach, so only the few threads above it
// search again.
DEVICE bool list_likeliest(SampleShared& shared, const float* logits, u32 count, u32 top) {
    u64 best = 0;
    for (u32 i = thread_index(); i < count; i += SAMPLE_THREADS) {
        best = most_of(best, key_of(logits[i], i));
    }
    u64 bound = ~0ull;
    for (u32 i = 0; i < top; i++) {
        bound = largest_key(shared, best < bound ? best : 0);
    }
    if (thread_index() == 0) {
        shared.listed = 0;
    }
    shared.list[thread_index()] = 0;
    sync_block();
    for (u32 i = thread_index(); best >= bound && i < count; i += SAMPLE_THREADS) {
        u64 key = key_of(logits[i], i);
        if (key >= bound) {
            u32 at = atomic_add(&shared.listed, 1u);
            if (at < SAMPLE_THREADS) {
                shared.list[at] = key;
            }
        }
    }
    sync_block();
    return shared.listed <= SAMPLE_THREADS;
}

DEVICE void report(SampleShared& shared, const SampleArgs& args, const SampleRow& row,
                   const float* logits, u32 token) {
    double below = normaliser(shared, logits, args.vocabulary);
    if (thread_index() == 0) {
        args.logprobs[block_x()] =
            token < args.vocabulary ? logprob(logits[token], below) : LEAST_LOGPROB;
    }
    u64 key = ~0ull;
    u32 top = least_of(least_of(row.top, MOST_TOP), args.vocabulary);
    bool is_listed = top > 0 && list_likeliest(shared, logits, args.vocabulary, top);
    u64 listed = shared.list[thread_index()];
    for (u32 i = 0; i < top; i++) {
        key = is_listed ? largest_key(shared, listed < key ? listed : 0)
                        : likeliest(shared, logits, args.vocabulary, key);
        if (thread_index() == 0) {
            args.top_tokens[block_x() * MOST_TOP + i] = token_of(key);
            args.top_logprobs[block_x() * MOST_TOP + i] = logprob(logit_of(key), below);
        }
    }
}

KERNEL(sample, SAMPLE_THREADS, SampleArgs) {
    SHARED(SampleShared, shared);
    SampleRow row = args.rows[block_x()];
    const float* logits = args.logits + (u64)row.row * args.vocabulary;
    u32 token = row.given;
    if (token == NONE) {
        token = sample_token(shared, args, row, logits);
    }
    if (thread_index() == 0) {
        args.tokens[block_x()] = token;
    }
    if (row.top != NONE && token != NONE) {
        report(shared, args, row, logits, token);
    }
}
