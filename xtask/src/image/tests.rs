//! The archive as `tar` and `sha256sum` see it, made with a small executable of Debian's.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::collections::BTreeMap;

use super::*;

/// Linked with two libraries besides what loads them.
const SMALL: &str = "/bin/ls";

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn built(folder: &Path) -> PathBuf {
    build(Path::new(SMALL), "registry/sandwire:1.2.3", folder).unwrap()
}

fn unpacked(image: &Path, folder: &Path) -> Value {
    let (image, folder) = (image.to_str().unwrap(), folder.to_str().unwrap());
    output(
        "tar",
        &["--extract", "--file", image, "--directory", folder],
    );
    let index = fs::read_to_string(Path::new(folder).join("index.json")).unwrap();
    serde_json::from_str(&index).unwrap()
}

/// The file that a descriptor names, if size and digest are its own.
fn blob(layout: &Path, described: &Value) -> PathBuf {
    let hash = described["digest"].as_str().unwrap();
    let hash = hash.strip_prefix("sha256:").unwrap();
    let path = layout.join("blobs/sha256").join(hash);
    let said = output("sha256sum", &[path.to_str().unwrap()]);
    assert_eq!(said.split(' ').next(), Some(hash));
    assert_eq!(described["size"], fs::metadata(&path).unwrap().len());
    path
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn every_content_has_the_digest_and_size_that_name_it() {
    let folder = tempfile::tempdir().unwrap();
    let layout = folder.path().join("layout");
    fs::create_dir(&layout).unwrap();
    let index = unpacked(&built(folder.path()), &layout);
    let described = &index["manifests"][0];
    let name = "org.opencontainers.image.ref.name";
    assert_eq!(described["annotations"][name], "registry/sandwire:1.2.3");
    let manifest = read(&blob(&layout, described));
    let configuration = read(&blob(&layout, &manifest["config"]));
    let layer = &manifest["layers"][0];
    blob(&layout, layer);
    assert_eq!(
        configuration["rootfs"]["diff_ids"],
        json!([layer["digest"]])
    );
    let expected = staging::architecture(&fs::read(SMALL).unwrap()).unwrap();
    assert_eq!(configuration["architecture"], expected);
    assert_eq!(
        configuration["config"]["Entrypoint"][0],
        "/usr/bin/sandwire"
    );
    let blobs = fs::read_dir(layout.join("blobs/sha256")).unwrap().count();
    assert_eq!(blobs, 3);
}

#[test]
fn the_layer_is_roots_and_has_the_executable_with_its_libraries_and_their_copyrights() {
    let folder = tempfile::tempdir().unwrap();
    let index = unpacked(&built(folder.path()), folder.path());
    let manifest = read(&blob(folder.path(), &index["manifests"][0]));
    let layer = blob(folder.path(), &manifest["layers"][0]);
    // Mode, owner, size, date, time, name.
    let listed = output(
        "tar",
        &[
            "--list",
            "--verbose",
            "--numeric-owner",
            "--file",
            layer.to_str().unwrap(),
        ],
    );
    let modes: BTreeMap<&str, &str> = listed
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            assert_eq!(words[1], "0/0", "{line}");
            (words[5], words[0])
        })
        .collect();
    assert_eq!(modes["./usr/bin/sandwire"], "-rwxr-xr-x");
    for inside in FOLDERS {
        assert_eq!(modes[&*format!("./{inside}/")], "drwxr-xr-x");
    }
    let ends = |end: &str| modes.keys().filter(|name| name.ends_with(end)).count();
    assert_eq!(
        (ends("/libc.so.6"), ends("/libc6/copyright")),
        (1, 1),
        "{listed}"
    );
    assert_eq!(ends("/libselinux.so.1"), 1, "{listed}");
}

#[test]
fn the_same_files_make_the_same_image() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let images = folders
        .each_ref()
        .map(|folder| fs::read(built(folder.path())).unwrap());
    assert!(images[0] == images[1]);
    let left = fs::read_dir(folders[0].path()).unwrap().count();
    assert_eq!(left, 1, "more than the image");
}

#[test]
fn libraries_are_those_with_a_path() {
    let said =
        "\tlinux-vdso.so.1 (0x1)\n\tlibm.so.6 => /lib/x/libm.so.6 (0x2)\n\t/lib64/ld.so (0x3)\n";
    assert_eq!(
        libraries(said).unwrap(),
        ["/lib/x/libm.so.6", "/lib64/ld.so"].map(PathBuf::from)
    );
    for none in ["\tlibm.so.6 => not found\n", "\tstatically linked\n", ""] {
        assert!(libraries(none).is_err(), "{none}");
    }
}

#[test]
fn a_name_has_a_tag() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["sandwire", "sandwire:", ":1", "host:5000/sandwire"] {
        let error = build(Path::new(SMALL), name, folder.path()).unwrap_err();
        assert!(error.to_string().contains("NAME:TAG"), "{error}");
    }
    let error = build(Path::new("/etc/passwd"), "sandwire:1", folder.path()).unwrap_err();
    assert!(error.to_string().contains("/etc/passwd"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
