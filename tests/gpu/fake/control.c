/* The file through which a test and the processes under it talk: see fake_device.h. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake_device.h"

/* Without a file there is no device, and this is used. */
static struct control nobodys;
static struct control *mapped = &nobodys;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("FAKE_DEVICE");
    if (!path || !*path)
        return;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0 || lseek(file, 0, SEEK_END) != sizeof(struct control)) {
        fprintf(stderr, "fake device: %s is no file of %zu bytes\n", path, sizeof(struct control));
        abort();
    }
    mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) {
        perror("fake device: mmap");
        abort();
    }
}

struct control *control(void) {
    return mapped;
}

int is_there(void) {
    return mapped != &nobodys;
}

int setting(enum setting_name name, int world) {
    struct setting *asked = &mapped->settings[name];
    int for_pid = asked->pid, for_world = asked->world;
    if ((for_pid && for_pid != getpid()) || (for_world && for_world != world))
        return 0;
    return asked->value;
}

void count(enum counter_name name, long more) {
    mapped->counters[name] += more;
}

void note(enum note_name kind, long stream, long other, long bytes) {
    long place = mapped->noted++;
    if (place < NOTES_MAX)
        mapped->notes[place] = (struct note){kind, getpid(), stream, other, bytes};
}

void nap(int ms) {
    struct timespec span = {ms / 1000, (ms % 1000) * 1000000L};
    while (nanosleep(&span, &span))
        ;
}
