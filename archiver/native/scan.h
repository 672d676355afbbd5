/* Finds one top-level field of a JSON object and checks the whole object on the way.
 *
 * It answers only what is certain. `SCAN_FOUND` and `SCAN_MISSING` mean that the bytes are exactly one
 * object by the grammar of RFC 8259, every byte of it. Whatever is not, or not as plain as that (an escape in a
 * name, deep nesting), is `SCAN_UNSURE`: the caller asks the decoder in Python, which decides what such a record
 * is. A mistake here would put a record under another tenant, so there is no
 * leniency, and the unit tests hold it against that decoder over hostile records.
 */
#ifndef ARCHIVER_SCAN_H
#define ARCHIVER_SCAN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum { SCAN_FOUND, SCAN_MISSING, SCAN_UNSURE } scan_result;

/* Deeper values are left to the decoder in Python; one bit of a 64-bit word for each level. */
#define DEPTH_MAX 60

/* How many of the next BLOCK bytes are plain ones of a string: none that is `"`, `\` or below 0x20. */
#ifdef __SSE2__
#include <emmintrin.h>
#define BLOCK 16
static inline int plain_bytes(const unsigned char *p) {
    __m128i block = _mm_loadu_si128((const __m128i *)p);
    __m128i quotes = _mm_cmpeq_epi8(block, _mm_set1_epi8('"'));
    __m128i slashes = _mm_cmpeq_epi8(block, _mm_set1_epi8('\\'));
    __m128i controls = _mm_cmpeq_epi8(_mm_min_epu8(block, _mm_set1_epi8(0x1f)), block);
    unsigned stops = (unsigned)_mm_movemask_epi8(_mm_or_si128(controls, _mm_or_si128(quotes, slashes)));
    return stops ? __builtin_ctz(stops) : BLOCK;
}
#else
#define BLOCK 8
#define ONES 0x0101010101010101ULL
static inline int plain_bytes(const unsigned char *p) {
    uint64_t word;
    memcpy(&word, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    uint64_t quote = word ^ (ONES * '"'), slash = word ^ (ONES * '\\');
    uint64_t quotes = (quote - ONES) & ~quote, slashes = (slash - ONES) & ~slash;
    uint64_t controls = (word - ONES * 0x20) & ~word;
    /* a byte behind one that stops may be marked too (a borrow), never one before it: the first mark is right */
    uint64_t stops = (quotes | slashes | controls) & (ONES * 0x80);
    return stops ? __builtin_ctzll(stops) >> 3 : BLOCK;
}
#endif

static inline int is_hex(unsigned char c) {
    return (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'f');
}

/* `p` is behind an opening quote. Returns the place of the closing one, or NULL. */
static const unsigned char *string_end(const unsigned char *p, const unsigned char *end, int *escaped) {
    for (;;) {
        while (end - p >= BLOCK) {
            int plain = plain_bytes(p);
            p += plain;
            if (plain < BLOCK) break;
        }
        while (p < end && *p != '"' && *p != '\\' && *p >= 0x20) p++;
        if (p >= end || *p < 0x20) return NULL;
        if (*p == '"') return p;
        *escaped = 1;
        if (end - p < 2) return NULL;
        if (p[1] == 'u') {
            if (end - p < 6 || !is_hex(p[2]) || !is_hex(p[3]) || !is_hex(p[4]) || !is_hex(p[5])) return NULL;
            /* halves of surrogate pairs: whether they fit together is for the decoder to say */
            if ((p[2] | 0x20) == 'd' && p[3] >= '8') return NULL;
            p += 6;
        } else if (memchr("\"\\/bfnrt", p[1], 8)) {
            p += 2;
        } else {
            return NULL;
        }
    }
}

static inline int is_digit(unsigned char c) { return c >= '0' && c <= '9'; }

/* `p` is at a digit or a minus. Returns the place behind the number, or NULL. */
static const unsigned char *number_end(const unsigned char *p, const unsigned char *end) {
    if (*p == '-' && ++p >= end) return NULL;
    if (!is_digit(*p)) return NULL;
    if (*p++ != '0') /* behind a leading zero no digit may follow: none is part of a number then */
        while (p < end && is_digit(*p)) p++;
    if (p < end && *p == '.') {
        if (++p >= end || !is_digit(*p)) return NULL;
        while (p < end && is_digit(*p)) p++;
    }
    if (p < end && (*p | 0x20) == 'e') {
        if (++p < end && (*p == '+' || *p == '-')) p++;
        if (p >= end || !is_digit(*p)) return NULL;
        while (p < end && is_digit(*p)) p++;
    }
    return p;
}

static inline const unsigned char *word_end(
    const unsigned char *p, const unsigned char *end, const char *word, ptrdiff_t length) {
    return end - p >= length && memcmp(p, word, (size_t)length) == 0 ? p + length : NULL;
}

static inline const unsigned char *skip_blanks(const unsigned char *p, const unsigned char *end) {
    while (p < end && *p <= ' ' && (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r')) p++;
    return p;
}

/* A string, number or word that starts at `p`; the place behind it, or NULL. */
static inline const unsigned char *scalar_end(const unsigned char *p, const unsigned char *end) {
    int escaped = 0;
    switch (*p) {
        case '"':
            p = string_end(p + 1, end, &escaped);
            return p ? p + 1 : NULL;
        case 't':
            return word_end(p, end, "true", 4);
        case 'f':
            return word_end(p, end, "false", 5);
        case 'n':
            return word_end(p, end, "null", 4);
        default:
            return number_end(p, end);
    }
}

/* `text` is a value; `name` the field's name as it stands in JSON without escapes, not quoted.
 * On SCAN_FOUND the token is the JSON text of the field's value (of the last one, where the name comes twice,
 * as every decoder has it); of an object or an array only its first byte. */
static scan_result scan_field(
    const unsigned char *text, size_t length, const unsigned char *name, size_t name_length,
    const unsigned char **token, size_t *token_length) {
    const unsigned char *p = text, *end = text + length;
    uint64_t in_object = 1; /* one bit a level, the innermost lowest: an object, or an array */
    int depth = 1, ours = 0, found = 0;

    p = skip_blanks(p, end);
    if (p >= end || *p != '{') return SCAN_UNSURE;
    p = skip_blanks(p + 1, end);
    if (p < end && *p == '}') goto closed;

member:
    if (p >= end) return SCAN_UNSURE;
    if (in_object & 1) {
        int escaped = 0;
        const unsigned char *close;
        if (*p != '"' || !(close = string_end(p + 1, end, &escaped)) || escaped) return SCAN_UNSURE;
        if (depth == 1)
            ours = (size_t)(close - p - 1) == name_length && memcmp(p + 1, name, name_length) == 0;
        p = skip_blanks(close + 1, end);
        if (p >= end || *p != ':') return SCAN_UNSURE;
        p = skip_blanks(p + 1, end);
        if (p >= end) return SCAN_UNSURE;
    }
    if (*p == '{' || *p == '[') {
        if (depth == 1 && ours) found = 1, *token = p, *token_length = 1;
        if (++depth > DEPTH_MAX) return SCAN_UNSURE;
        in_object = in_object << 1 | (*p == '{');
        p = skip_blanks(p + 1, end);
        if (p < end && *p == ((in_object & 1) ? '}' : ']')) goto closed;
        goto member;
    } else {
        const unsigned char *start = p;
        if (!(p = scalar_end(p, end))) return SCAN_UNSURE;
        if (depth == 1 && ours) found = 1, *token = start, *token_length = (size_t)(p - start);
    }

next:
    p = skip_blanks(p, end);
    if (p >= end) return SCAN_UNSURE;
    if (*p == ',') {
        p = skip_blanks(p + 1, end);
        goto member;
    }
    if (*p != ((in_object & 1) ? '}' : ']')) return SCAN_UNSURE;

closed:
    p++;
    in_object >>= 1;
    if (--depth > 0) goto next;
    if (skip_blanks(p, end) != end) return SCAN_UNSURE;
    return found ? SCAN_FOUND : SCAN_MISSING;
}

#endif
