/* Whether the processor has what this library was built for. Built itself for the plainest processor of its kind. */
#include <stdint.h>

#if defined(LEGATO_AMX)
#include <sys/syscall.h>
#include <unistd.h>

/* Linux gives the tiles' registers to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
static int has_tiles(void) {
    uint32_t a = 7, b, c = 0, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    int amx_bf16 = d >> 22 & 1, amx_tile = d >> 24 & 1, amx_int8 = d >> 25 & 1;
    return amx_bf16 && amx_tile && amx_int8 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#endif

#if defined(__x86_64__)
static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

__attribute__((visibility("default"))) int legato_supported(void) {
#if defined(LEGATO_AMX)
    return has_avx512() && __builtin_cpu_supports("avx512vnni") && has_tiles();
#elif defined(LEGATO_AVX512)
    return has_avx512();
#elif defined(LEGATO_AVX2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

/* What the library was compiled from: `sources.py` says how that is told. */
__attribute__((visibility("default"))) const char *legato_sources(void) { return LEGATO_SOURCES; }
