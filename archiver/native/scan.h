/* Finds fields of a JSON object by their paths and checks the whole object on the way.
 *
 * It answers only what is certain. `SCAN_SURE` means that the bytes are exactly one object by the grammar of
 * RFC 8259, every byte of it. Whatever is not, or not as plain as that (an escape in a name, deep nesting), is
 * `SCAN_UNSURE`: the caller asks the decoder in Python, which decides what such a record is. A mistake here
 * would put a record under another tenant, so there is no leniency, and the unit tests hold it against that
 * decoder over hostile records.
 */
#ifndef ARCHIVER_SCAN_H
#define ARCHIVER_SCAN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum { SCAN_UNSURE, SCAN_SURE } scan_result;

/* A compiler that finds a function used twice too large would call it, which costs what it does. */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* More fields, or names in a path, are left to Python. */
#define FIELDS_MAX 8
#define NAMES_MAX 8

/* A run of bytes of others. */
typedef struct {
    const unsigned char *bytes;
    size_t length;
} scan_text;

/* What to look for. Sets of fields have a bit for each. */
typedef struct {
    int count;
    unsigned ends[NAMES_MAX];               /* by level: the fields whose path ends there */
    scan_text names[NAMES_MAX][FIELDS_MAX]; /* by level and field */
} scan_paths;

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
ALWAYS_INLINE const unsigned char *number_end(const unsigned char *p, const unsigned char *end) {
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
ALWAYS_INLINE const unsigned char *scalar_end(const unsigned char *p, const unsigned char *end) {
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

/* Add a field: names as they stand in JSON without escapes, a dot between them. False where it is none or too much. */
static int add_path(scan_paths *paths, const char *path, size_t length) {
    const unsigned char *name = (const unsigned char *)path, *end = name + length;
    if (paths->count == FIELDS_MAX) return 0;
    for (int level = 0; level < NAMES_MAX; level++) {
        const unsigned char *dot = memchr(name, '.', (size_t)(end - name));
        size_t name_length = (size_t)((dot ? dot : end) - name);
        if (!name_length) return 0;
        paths->names[level][paths->count] = (scan_text){name, name_length};
        if (!dot) {
            paths->ends[level] |= 1u << paths->count++;
            return 1;
        }
        name = dot + 1;
    }
    return 0;
}

/* Those of the first `count` fields, among `wanted`, that have this name at this level. */
static inline unsigned fields_named(
    const scan_paths *paths, int count, int level, unsigned wanted, const unsigned char *name, size_t length) {
    unsigned named = 0;
    for (int i = 0; i < count; i++) {
        const scan_text *own = &paths->names[level][i];
        if ((wanted >> i & 1) && own->length == length && memcmp(own->bytes, name, length) == 0) named |= 1u << i;
    }
    return named;
}

/* Note a value for those of the `named` fields whose path ends at its name. What was noted for the others is forgotten:
 * where a name comes twice the last one counts, as every decoder has it, and so does only what is in that. */
static inline void note_value(
    scan_text *texts, int count, unsigned named, unsigned ends, const unsigned char *value, size_t length) {
    for (int i = 0; i < count; i++)
        if (named >> i & 1) texts[i] = (scan_text){value, ends >> i & 1 ? length : 0};
}

/* `scan_fields`, compiled twice: with `one`, a constant, there is a single field and it is at the top level. */
ALWAYS_INLINE scan_result scan_by(
    const unsigned char *text, size_t length, const scan_paths *paths, const int one, scan_text *texts) {
    const unsigned char *p = text, *end = text + length;
    const int count = one ? 1 : paths->count;
    uint64_t in_object = 1; /* one bit a level, the innermost lowest: an object, or an array */
    int depth = 0;
    int level = 0;              /* of the objects we are in, the innermost that lies on a path: 0 is the outermost */
    unsigned wanted[NAMES_MAX]; /* by level: the fields that may be in that object */
    unsigned named = 0;         /* those that the value we come to belongs to */

    for (int i = 0; i < count; i++) texts[i] = (scan_text){text, 0};
    wanted[0] = (1u << count) - 1;
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
        named = depth == level
            ? fields_named(paths, count, level, wanted[level], p + 1, (size_t)(close - p - 1)) : 0;
        p = skip_blanks(close + 1, end);
        if (p >= end || *p != ':') return SCAN_UNSURE;
        p = skip_blanks(p + 1, end);
        if (p >= end) return SCAN_UNSURE;
    }
    if (*p == '{' || *p == '[') {
        int object = *p == '{';
        unsigned ends = one ? 1 : paths->ends[level];
        if (named) note_value(texts, count, named, ends, p, 1);
        if (++depth >= DEPTH_MAX) return SCAN_UNSURE;
        in_object = in_object << 1 | object;
        if (object && (named & ~ends)) wanted[++level] = named & ~ends;
        named = 0; /* an array's values have no name */
        p = skip_blanks(p + 1, end);
        if (p < end && *p == (object ? '}' : ']')) goto closed;
        goto member;
    } else {
        const unsigned char *start = p;
        if (!(p = scalar_end(p, end))) return SCAN_UNSURE;
        if (named) note_value(texts, count, named, one ? 1 : paths->ends[level], start, (size_t)(p - start));
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
    if (!one && depth == level) level--;
    if (depth-- > 0) goto next;
    return skip_blanks(p, end) == end ? SCAN_SURE : SCAN_UNSURE;
}

/* A function of its own, or it would share registers with the other. */
static __attribute__((noinline)) scan_result scan_one(
    const unsigned char *text, size_t length, const scan_paths *paths, scan_text *texts) {
    return scan_by(text, length, paths, 1, texts);
}

/* `text` is a value. On SCAN_SURE `texts` are the JSON texts of the fields' values: of an object or an array only its
 * first byte, empty where there is none, which is also so where a path leads through what is no object. */
static scan_result scan_fields(
    const unsigned char *text, size_t length, const scan_paths *paths, scan_text *texts) {
    if (paths->count == 1 && paths->ends[0]) return scan_one(text, length, paths, texts);
    return scan_by(text, length, paths, 0, texts);
}

#endif
