/* NVML as far as stages/kit/launcher/gpus.py asks, on GPUs that a text file describes.
 *
 * The file, named by FAKE_NVML_STATE, is read at nvmlInit. A line each, GPUs first:
 *   gpu UUID USED_BYTES TOTAL_BYTES DRAWS MIG NAME
 *   compute|graphics GPU PID USED_BYTES     (-1: not told)
 *   fails FUNCTION CODE                     (on every GPU)
 *   lost GPU
 * Signatures and layouts: nvml.h, and what pynvml.py makes of it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7, UNKNOWN = 999, GPU_IS_LOST = 15 };
enum { MAX_GPUS = 16, MAX_PROCESSES = 16, MAX_FAILURES = 16 };

typedef unsigned long long Bytes;
typedef struct { unsigned version; Bytes total, reserved, free, used; } Memory;
typedef struct { unsigned pid; Bytes used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { Process listed[MAX_PROCESSES]; unsigned count; } Processes;
typedef struct {
    char uuid[96], name[96];
    Bytes used, total;
    int draws, mig, lost;
    Processes compute, graphics;
} Gpu;

static Gpu gpus[MAX_GPUS];
static unsigned num_gpus;
static struct { char function[64]; int code; } failures[MAX_FAILURES];
static unsigned num_failures;

static int failure(const char *function) {
    for (unsigned i = 0; i < num_failures; i++)
        if (strcmp(failures[i].function, function) == 0) return failures[i].code;
    return SUCCESS;
}

#define FAIL_IF_TOLD_TO do { int code = failure(__func__); if (code != SUCCESS) return code; } while (0)

static void read_line(const char *line) {
    char kind[16];
    unsigned gpu, pid;
    long long used;
    if (sscanf(line, "gpu %95s %llu %llu %d %d %95[^\n]", gpus[num_gpus].uuid, &gpus[num_gpus].used,
               &gpus[num_gpus].total, &gpus[num_gpus].draws, &gpus[num_gpus].mig, gpus[num_gpus].name) == 6) {
        num_gpus++;
    } else if (sscanf(line, "fails %63s %d", failures[num_failures].function, &failures[num_failures].code) == 2) {
        num_failures++;
    } else if (sscanf(line, "lost %u", &gpu) == 1) {
        gpus[gpu].lost = 1;
    } else if (sscanf(line, "%15s %u %u %lld", kind, &gpu, &pid, &used) == 4) {
        Processes *processes = strcmp(kind, "compute") == 0 ? &gpus[gpu].compute : &gpus[gpu].graphics;
        processes->listed[processes->count++] = (Process){.pid = pid, .used = (Bytes)used};
    } else {
        fprintf(stderr, "fake_nvml: what is this? %s\n", line);
        abort();
    }
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *state = path ? fopen(path, "r") : NULL;
    if (!state) return UNKNOWN;
    memset(gpus, 0, sizeof gpus);
    num_gpus = num_failures = 0;
    char line[512];
    while (fgets(line, sizeof line, state)) read_line(line);
    fclose(state);
    FAIL_IF_TOLD_TO;
    return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) { (void)code; return "fake error"; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    FAIL_IF_TOLD_TO;
    snprintf(version, length, "580.95.05");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    FAIL_IF_TOLD_TO;
    *count = num_gpus;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **device) {
    if (index >= num_gpus) return INVALID_ARGUMENT;
    if (gpus[index].lost) return GPU_IS_LOST;
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(Gpu *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "%s", device->uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(Gpu *device, char *name, unsigned length) {
    snprintf(name, length, "%s", device->name);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Gpu *device, unsigned *current, unsigned *pending) {
    FAIL_IF_TOLD_TO;
    *current = *pending = (unsigned)device->mig;
    return SUCCESS;
}

int nvmlDeviceGetDisplayActive(Gpu *device, int *active) {
    FAIL_IF_TOLD_TO;
    *active = device->draws;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Gpu *device, Memory *memory) {
    FAIL_IF_TOLD_TO;
    if (memory->version != (sizeof(Memory) | 2u << 24)) return INVALID_ARGUMENT;
    memory->total = device->total;
    memory->used = device->used;
    memory->reserved = 0;
    memory->free = device->total - device->used;
    return SUCCESS;
}

static int list(const Processes *processes, unsigned *room, Process *listed) {
    unsigned given = *room;
    *room = processes->count;
    if (processes->count > given) return INSUFFICIENT_SIZE;
    if (processes->count) memcpy(listed, processes->listed, processes->count * sizeof(Process));
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *device, unsigned *room, Process *listed) {
    FAIL_IF_TOLD_TO;
    return list(&device->compute, room, listed);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *device, unsigned *room, Process *listed) {
    FAIL_IF_TOLD_TO;
    return list(&device->graphics, room, listed);
}
