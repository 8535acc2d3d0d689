/* Start a Cortex-M without an operating system or a C library, and print words by semihosting. */
#include <stdint.h>

void emit(uint32_t word);
void run(void);
void start(void);

extern uint32_t stack_top[], bss_start[], bss_end[];

typedef struct {
    uint32_t *stack;
    void (*reset)(void);
} vector_table;
__attribute__((section(".vectors"), used)) static const vector_table vectors = {stack_top, start};

static int semihost(int operation, const void *argument)
{
    register int r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}

void emit(uint32_t word)
{
    char text[10];
    int i;
    for (i = 0; i < 8; ++i)
        text[i] = "0123456789abcdef"[word >> (28 - 4 * i) & 15u];
    text[8] = '\n';
    text[9] = 0;
    semihost(0x04, text); /* SYS_WRITE0 */
}

void start(void)
{
    uint32_t *word;
    *(volatile uint32_t *)0xE000ED88 |= 0xFu << 20; /* CPACR: switch the floating-point unit on */
    __asm__ volatile("dsb\n isb");
    for (word = bss_start; word < bss_end; ++word)
        *word = 0;
    run();
    semihost(0x18, (void *)0x20026); /* SYS_EXIT, normal end */
    for (;;) {
    }
}
