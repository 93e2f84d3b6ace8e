//! The package as `dpkg-deb` shows and unpacks it, made with a small executable of Debian's.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{collections::BTreeMap, os::unix::fs::symlink, process::Command};

use super::*;

/// An executable that answers, as ours is asked for completions.
const EXECUTABLE: &str = "/bin/echo";

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// A package in a folder, unpacked beside it.
struct Built {
    folder: tempfile::TempDir,
    package: String,
}

impl Built {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (executable, version) = (Path::new(EXECUTABLE), "1.2.3");
        let package = build(workspace::root(), executable, version, folder.path(), &[]).unwrap();
        Self {
            package: package.to_string_lossy().into_owned(),
            folder,
        }
    }

    fn unpack(&self) -> PathBuf {
        let root = self.folder.path().join("host");
        output("dpkg-deb", &["-x", &self.package, root.to_str().unwrap()]);
        root
    }
}

#[test]
fn the_package_has_what_a_host_needs_for_everybody_to_read() {
    let built = Built::new();
    // Mode, owner, size, date, time, name.
    let listed: BTreeMap<String, (String, String)> =
        output("dpkg-deb", &["--contents", &built.package])
            .lines()
            .map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                (
                    words[5].to_owned(),
                    (words[0].to_owned(), words[1].to_owned()),
                )
            })
            .collect();
    for (name, (mode, owner)) in &listed {
        assert_eq!(owner, "root/root", "{name}");
        let expected = match name.as_str() {
            "./usr/bin/sandwire" => "-rwxr-xr-x",
            "./usr/lib/cni/sandwire-cni" => "lrwxrwxrwx",
            folder if folder.ends_with('/') => "drwxr-xr-x",
            _ => "-rw-r--r--",
        };
        assert_eq!(mode, expected, "{name}");
    }
    let mut expected: Vec<String> = [
        "etc/sandwire/sandwire.toml",
        "usr/bin/sandwire",
        "usr/lib/cni/sandwire-cni",
        "usr/lib/NetworkManager/conf.d/10-sandwire.conf",
        "usr/lib/systemd/network/10-sandwire.network",
        "usr/lib/systemd/network/10-sandwire-shared.network",
        "usr/lib/sysusers.d/sandwire.conf",
        "usr/share/doc/sandwire/README.md",
        "usr/share/doc/sandwire/copyright",
        "usr/share/doc/sandwire/docs/operate.md",
        "usr/share/doc/sandwire/docs/recipes/qemu.md",
    ]
    .map(str::to_owned)
    .into();
    expected.extend(COMPLETIONS.map(|(_, path)| path.to_owned()));
    for unit in ["", "-vsock", "-impair", "-relay"] {
        expected.push(format!("usr/lib/systemd/system/sandwire{unit}.service"));
    }
    for path in expected {
        assert!(
            listed.contains_key(&format!("./{path}")),
            "{path} is missing"
        );
    }
    // An administrator's file that isn't marked as one would be overwritten.
    let configuration: Vec<&String> = listed
        .keys()
        .filter(|name| name.starts_with("./etc/") && !name.ends_with('/'))
        .collect();
    assert_eq!(configuration, [&format!("./{CONFIGURATION}")]);
}

#[test]
fn the_package_is_described() {
    let built = Built::new();
    let field = |name: &str| {
        let text = output("dpkg-deb", &["--field", &built.package, name]);
        text.trim().to_owned()
    };
    assert_eq!(
        (field("Package"), field("Version")),
        ("sandwire".into(), "1.2.3".into())
    );
    assert!(["amd64", "arm64"].contains(&field("Architecture").as_str()));
    assert!(
        field("Depends").contains("libc6 (>= 2."),
        "{}",
        field("Depends")
    );
    assert!(field("Installed-Size").parse::<u32>().unwrap() > 100);
    let info = output("dpkg-deb", &["--info", &built.package]);
    for script in SCRIPTS {
        let line = info.lines().find(|line| line.contains(script)).unwrap();
        assert!(line.contains('*') && line.contains("#!/bin/sh"), "{line}");
    }
    let root = built.unpack();
    let completion = fs::read_to_string(root.join(COMPLETIONS[0].1)).unwrap();
    assert_eq!(completion, "completion bash\n");
    assert_eq!(
        fs::canonicalize(root.join("usr/lib/cni/sandwire-cni")).unwrap(),
        fs::canonicalize(root.join("usr/bin/sandwire")).unwrap()
    );
}

#[test]
fn a_removal_keeps_what_a_purge_needs_and_a_purge_leaves_nothing() {
    let built = Built::new();
    let root = built.unpack();
    let script = |name: &str, operation: &str| {
        let path = workspace::root().join("packaging/debian").join(name);
        let done = Command::new("sh")
            .arg(path)
            .arg(operation)
            .env("DPKG_ROOT", &root)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{name} {operation}: {error}");
    };
    let kept = root.join("var/lib/sandwire");
    for operation in ["upgrade", "remove"] {
        assert!(!kept.exists(), "kept before {operation}");
        script("prerm", operation);
    }
    assert!(kept.join("sandwire").exists() && kept.join("sandwire.toml").exists());
    // Installed again, it is there itself.
    script("postinst", "configure");
    assert!(!kept.exists());
    let users = fs::read_to_string(root.join("etc/passwd")).unwrap();
    let unit = "packaging/systemd/sandwire-vsock.service";
    let unit = fs::read_to_string(workspace::root().join(unit)).unwrap();
    let (_, user) = unit.split_once(" --user ").unwrap();
    let user = user.split_whitespace().next().unwrap();
    let is_made = users
        .lines()
        .any(|line| line.starts_with(&format!("{user}:")));
    assert!(is_made, "no {user} in:\n{users}");
    script("prerm", "remove");
    let wanted = root.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wanted).unwrap();
    symlink(
        "/lib/systemd/system/sandwire.service",
        wanted.join("sandwire.service"),
    )
    .unwrap();
    fs::create_dir_all(root.join("run/sandwire/vsock")).unwrap();
    fs::write(root.join("etc/sandwire/relay.toml"), "").unwrap();
    script("postrm", "remove");
    assert!(kept.exists() && root.join("run/sandwire").exists());
    script("postrm", "purge");
    for gone in [
        kept,
        root.join("run/sandwire"),
        wanted.join("sandwire.service"),
    ] {
        assert!(
            gone.symlink_metadata().is_err(),
            "{} is there",
            gone.display()
        );
    }
    assert!(
        root.join("etc/sandwire/relay.toml").exists(),
        "the administrator's own"
    );
}

/// Of the host's own there are, as the script sees it, the programs alone.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_purge_leaves_what_is_mounted_and_what_others_have_on_a_bpffs() {
    sandwire_testlab::lab::run(|lab| {
        for folder in ["/etc", "/var/lib"] {
            lab.run(&format!("mount -t tmpfs tmpfs {folder}"));
        }
        let kept = Path::new("/var/lib/sandwire");
        let identities = Path::new("/sys/fs/bpf/identities");
        for (named, is_gone) in [("/sys/fs/bpf", false), ("/sys/fs/bpf/identities", true)] {
            let mine = "/run/sandwire/vsock/web.0/mine";
            for folder in [kept, identities, Path::new(mine)] {
                fs::create_dir_all(folder).unwrap();
            }
            lab.run(&format!("mount -t tmpfs tmpfs {mine}"));
            let precious = Path::new(mine).join("precious");
            fs::write(&precious, "").unwrap();
            // It has nothing to clean up.
            symlink("/bin/true", kept.join("sandwire")).unwrap();
            let configuration = format!("identity_folder = \"{named}\"\n");
            fs::write(kept.join("sandwire.toml"), configuration).unwrap();
            let script = workspace::root().join("packaging/debian/postrm");
            let said = output("sh", &[script.to_str().unwrap(), "purge"]);
            assert!(precious.exists(), "a tenant's file is gone");
            assert!(said.contains("/run/sandwire"), "{said}");
            assert!(!kept.exists());
            assert_eq!(!identities.exists(), is_gone, "{named}");
            lab.run(&format!("umount {mine}"));
        }
    });
}

#[test]
fn scripts_start_and_enable_nothing() {
    for name in SCRIPTS {
        let path = workspace::root().join("packaging/debian").join(name);
        let text = fs::read_to_string(&path).unwrap();
        output("sh", &["-n", path.to_str().unwrap()]);
        for verb in [
            "enable",
            "unmask",
            " start ",
            " restart ",
            "reload sandwire",
        ] {
            assert!(
                !text
                    .lines()
                    .any(|line| !line.starts_with('#') && line.contains(verb)),
                "{name}: {verb}"
            );
        }
    }
}

#[test]
fn the_libc_is_told_by_the_executable() {
    let names = b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.2.5\0GLIBC_PRIVATE\0";
    assert_eq!(libc_version(names), "2.34");
}

#[test]
fn a_description_leaves_nothing_open() {
    let template = "Version: @VERSION@\n";
    assert_eq!(
        control(template, &[("@VERSION@", "1")]).unwrap(),
        "Version: 1\n"
    );
    assert!(control(template, &[]).is_err());
    assert!(control(template, &[("@VERSION@", "1"), ("@LIBC@", "2")]).is_err());
}
