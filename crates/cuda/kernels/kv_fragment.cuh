// Keys and values as tensor cores multiply them: fragments of the tiles of a page, packed ones unpacked to f16.
// kv_format.cuh and attention.cuh, which say how tiles lie, go before this.
//
//   global, or shared: elements ------------------------------------------> B fragments
//                      codes ----> what they stand for, f16 --- x scales -->

#if TENSOR_CORES
DEVICE u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
template <bool SHARED, class T>
DEVICE T load_once(const T *from) {
    return SHARED ? *from : __ldg(from);
}
// Whether quads of values have to be unpacked: fragments of 8 columns then come from the same ones.
#define VALUES_ARE_QUADS (KvFormat<true>::IS_PACKED && KvFormat<true>::BITS < 8)
typedef LevelBytes<KvFormat<false>> KeyLevels;
typedef LevelBytes<KvFormat<true>> ValueLevels;
DEVICE uint4 multiply_fragment(const uint4 &v, const uint4 &by) {
    return make_uint4(hmul2(v.x, by.x), hmul2(v.y, by.y), hmul2(v.z, by.z), hmul2(v.w, by.w));
}
// 8 codes of a row of a tile in 8 bits, as f16 pairs.
template <bool SHARED>
DEVICE uint4 load_bytes(const u8 *row) {
    const uint2 codes = load_once<SHARED>((const uint2 *) row + (threadIdx.x & 3));
    // Codes are 1152 less than the number that 0x64 makes of their bytes.
    const u32 low = codes.x ^ 0x80808080, high = codes.y ^ 0x80808080;
    return make_uint4(hsub2(__byte_perm(low, 0x64646464, 0x4140), 0x64806480),
                      hsub2(__byte_perm(low, 0x64646464, 0x4342), 0x64806480),
                      hsub2(__byte_perm(high, 0x64646464, 0x4140), 0x64806480),
                      hsub2(__byte_perm(high, 0x64646464, 0x4342), 0x64806480));
}
// Two quads of a key.
template <bool SHARED>
DEVICE uint4 load_key_quads(const u8 *tile, int row, const KeyLevels &levels) {
    typedef KvFormat<false> F;
    const int t = threadIdx.x & 3;
    u32 x, high = 0;
    if constexpr (F::BITS >= 4) x = load_once<SHARED>((const u32 *) (tile + row * 16) + t);
    else x = spread_pairs(permute_bytes(load_once<SHARED>((const u16 *) (tile + row * 8) + t), 0, 0x4140));
    if constexpr (F::BITS % 2) {
        high = load_once<SHARED>(tile + F::high_at(row, 2 * t));
        high = (high | high << 12) & 0x000f000f;
    }
    return unpack_quads<F>(x, high, levels);
}
// A quad of each of 8 keys: the fragments of all of a tile's columns.
template <bool SHARED>
DEVICE void load_value_quads(const u8 *tile, const uint4 &scales, uint4 (&v)[4], const ValueLevels &levels) {
    typedef KvFormat<true> F;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u32 x[4], high[4] = {0, 0, 0, 0};
    if constexpr (F::BITS >= 4) {
        const uint4 of = load_once<SHARED>((const uint4 *) (tile + g * 64) + t);
        x[0] = of.x, x[1] = of.y, x[2] = of.z, x[3] = of.w;
    } else {
        const uint2 of = load_once<SHARED>((const uint2 *) (tile + g * 32) + t);
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = spread_pairs(permute_bytes(i < 2 ? of.x : of.y, 0, i % 2 ? 0x4342 : 0x4140));
    }
    if constexpr (F::BITS % 2) {
        const uint2 of = load_once<SHARED>((const uint2 *) (tile + F::high_at(0, g)) + t);
#pragma unroll
        for (int i = 0; i < 4; i++)
            high[i] = permute_bytes(i < 2 ? of.x : of.y, 0, i % 2 ? 0x4342 : 0x4140) >> (g % 2 * 4) & 0x000f000f;
    }
    uint4 of[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        of[i] = unpack_quads<F>(x[i], high[i], levels);
        const u32 by = word(scales, i);
        of[i] = multiply_fragment(of[i], make_uint4(by, by, by, by));
    }
#pragma unroll
    for (int n = 0; n < 4; n++) v[n] = make_uint4(word(of[0], n), word(of[1], n), word(of[2], n), word(of[3], n));
}
// The lane's B fragment of rows 8 n to 8 n + 7 of a tile, in global memory or SHARED: 32 columns of keys, or 32 keys of
// columns, as f16 pairs. `scales` are those of the tile's keys, in packed formats.
template <bool VALUES, bool SHARED>
DEVICE uint4 load_fragment(const u8 *tile, const u8 *scales, int n,
                           const LevelBytes<KvFormat<VALUES>> &levels = LevelBytes<KvFormat<VALUES>>()) {
    const int lane = threadIdx.x & 31, row = 8 * n + (lane >> 2);
    uint4 v;
    if constexpr (!KvFormat<VALUES>::IS_PACKED) {
        if constexpr (SHARED) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(smem_address(tile + n * 512 + lane * 16))
                         : "memory");
        } else {
            const u32 *from = (const u32 *) (tile + n * 512) + lane;
            v = make_uint4(__ldg(from), __ldg(from + 32), __ldg(from + 64), __ldg(from + 96));
        }
    } else if constexpr (VALUES) {
        const uint4 by = load_once<SHARED>((const uint4 *) scales + (lane & 3));
        if constexpr (KvFormat<true>::BITS == 8) {
            v = multiply_fragment(load_bytes<SHARED>(tile + row * 32), by);
        } else {
            uint4 all[4];
            load_value_quads<SHARED>(tile, by, all, levels);
            v = n == 0 ? all[0] : n == 1 ? all[1] : n == 2 ? all[2] : all[3];
        }
    } else {
        u32 scale = load_once<SHARED>((const u16 *) scales + row);
        scale |= scale << 16;
        if constexpr (KvFormat<false>::BITS == 8) v = load_bytes<SHARED>(tile + row * 32);
        else v = load_key_quads<SHARED>(tile, row, levels);
        v = multiply_fragment(v, make_uint4(scale, scale, scale, scale));
    }
    return v;
}
// The fragments of all columns of a tile of values.
template <bool SHARED>
DEVICE void load_value_tile(const u8 *tile, const u8 *scales, uint4 (&v)[4], const ValueLevels &levels) {
    if constexpr (VALUES_ARE_QUADS) {
        load_value_quads<SHARED>(tile, load_once<SHARED>((const uint4 *) scales + (threadIdx.x & 3)), v, levels);
    } else {
#pragma unroll
        for (int n = 0; n < 4; n++) v[n] = load_fragment<true, SHARED>(tile, scales, n);
    }
}

// Fragments of a page in global memory: keys 8 n to 8 n + 7 by columns 32 b to 32 b + 31.
DEVICE uint4 load_key(const u8 *page, int b, int n) {
    typedef KvFormat<false> F;
    return load_fragment<false, false>(page + F::tile_at(HEAD_DIM, b, n / 4), page + F::scales_of(HEAD_DIM, b, n / 4),
                                       n % 4);
}
// Fragments of half a page's values in global memory: columns from `first` on, 8 for each fragment number `from` to
// `to`.
template <int COLUMNS, int N>
DEVICE void load_values(const u8 *page, int first, int half, int from, int to, uint4 (&v)[N]) {
    typedef KvFormat<true> F;
    auto tile = [&](int column) { return page + F::tile_at(HEAD_DIM, column / 32, half); };
    auto scales = [&](int column) { return page + F::scales_of(HEAD_DIM, column / 32, half); };
    if constexpr (VALUES_ARE_QUADS && COLUMNS % 32 == 0 && N % 4 == 0) {
#pragma unroll
        for (int n = from; n < to; n += 4) {
            uint4 of[4];
            load_value_quads<false>(tile(first + n * 8),
                                    __ldg((const uint4 *) scales(first + n * 8) + (threadIdx.x & 3)), of,
                                    ValueLevels());
#pragma unroll
            for (int i = 0; i < 4; i++) v[n + i] = of[i];
        }
    } else {
#pragma unroll
        for (int n = from; n < to; n++) {
            const u32 column = first + n * 8;
            v[n] = load_fragment<true, false>(tile(column), scales(column), column % 32 / 8);
        }
    }
}
#endif
