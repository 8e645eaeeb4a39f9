//! What this machine has: memory and open files, as far as the system says.

/// Bytes of memory: in all, and free for a new program. `None` where the system does
/// not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ram {
    /// Bytes of memory in all, or as many as this program may have.
    pub(crate) total: u64,
    /// Free now.
    pub(crate) available: u64,
}

/// What `/proc` and the control group say; nothing on other systems.
pub(crate) fn ram() -> Option<Ram> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let ram = parse(&info)?;
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let limit = limit
        .and_then(|l| l.trim().parse().ok())
        .unwrap_or(u64::MAX);
    Some(Ram {
        total: ram.total.min(limit),
        available: ram.available.min(limit),
    })
}

/// Vendor, model and stepping of the processor, which Arm calls implementer, part, variant and revision; empty where
/// the system does not say.
pub(crate) fn processor() -> String {
    let told = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let first = told.split("\n\n").next().unwrap_or_default();
    let is_kept = |line: &&str| {
        let kept = [
            "vendor_id",
            "cpu family",
            "model",
            "stepping",
            "CPU implementer",
            "CPU variant",
            "CPU part",
            "CPU revision",
        ];
        kept.iter().any(|key| line.starts_with(key))
    };
    first.lines().filter(is_kept).collect::<Vec<_>>().join("; ")
}

fn parse(info: &str) -> Option<Ram> {
    Some(Ram {
        total: field(info, "MemTotal")?,
        available: field(info, "MemAvailable")?,
    })
}

/// The bytes that a line of `info` gives for `name`.
fn field(info: &str, name: &str) -> Option<u64> {
    let line = info
        .lines()
        .find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    let kilobytes = line.trim().strip_suffix("kB")?.trim().parse::<u64>();
    kilobytes.ok()?.checked_mul(1024)
}

/// Bytes of this program's memory that are resident, its mapped files included; nothing on systems that do not say.
pub(crate) fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    field(&status, "VmRSS")
}

/// Allows this program as many open files as the system lets it have, and says how many
/// those are; `None` where there is no such limit.
#[cfg(unix)]
pub(crate) fn open_files() -> Option<usize> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // Where the system refuses, what there was is what there is.
    let _ = setrlimit(Resource::Nofile, most);
    let files = getrlimit(Resource::Nofile).current?;
    usize::try_from(files).ok()
}

#[cfg(not(unix))]
pub(crate) fn open_files() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let info = "MemTotal:       16 kB\nMemFree:  1 kB\nMemAvailable:    4 kB\n";
        let expected = Ram {
            total: 16 << 10,
            available: 4 << 10,
        };
        assert_eq!(parse(info), Some(expected));
        for odd in [
            "",
            "MemTotal: 16 kB\n",
            "MemTotal: x kB\nMemAvailable: 1 kB\n",
        ] {
            assert_eq!(parse(odd), None, "{odd}");
        }
    }
}
