/* For a user-mode Linux, by LD_PRELOAD: lets it set the vector registers of its processes also where these are more than
 * it knows of.
 *
 * The kernel takes them as a whole or not at all (EFAULT; seen on Linux 6.18, where processors with AMX have 11,008 bytes).
 * User-mode Linux 6.1 has room for fewer, and panics at its first process ("ptrace set fp regs failed"). What it doesn't know
 * of is left as it is. */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Not on the stack: those of the kernel's threads have 16 KiB. It has one CPU, and isn't preempted in between. */
static char whole[64 * 1024] __attribute__((aligned(64)));

static long set_registers(pid_t process, const struct iovec *known)
{
	struct iovec all = {whole, sizeof(whole)};

	if (syscall(SYS_ptrace, PTRACE_GETREGSET, process, NT_X86_XSTATE, &all))
		return -1;
	if (known->iov_len >= all.iov_len)
		return syscall(SYS_ptrace, PTRACE_SETREGSET, process, NT_X86_XSTATE, known);
	memcpy(whole, known->iov_base, known->iov_len);
	return syscall(SYS_ptrace, PTRACE_SETREGSET, process, NT_X86_XSTATE, &all);
}

/* The system call gives words by a pointer, the library as its result. */
static long peek(enum __ptrace_request request, pid_t process, void *address)
{
	long word;

	if (syscall(SYS_ptrace, request, process, address, &word))
		return -1;
	errno = 0;
	return word;
}

long ptrace(enum __ptrace_request request, ...)
{
	void *address, *data;
	pid_t process;
	va_list rest;

	va_start(rest, request);
	process = va_arg(rest, pid_t);
	address = va_arg(rest, void *);
	data = va_arg(rest, void *);
	va_end(rest);
	if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE)
		return set_registers(process, data);
	if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER)
		return peek(request, process, address);
	return syscall(SYS_ptrace, request, process, address, data);
}
