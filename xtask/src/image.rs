//! Puts an image for containers together from the release executable: an archive by the OCI image format specification (1.1),
//! for `podman load`, `skopeo copy` and what else knows the format.
//!
//! It has one layer with the executable, the libraries that it is linked with and their copyrights, and no shell. Nothing in it
//! tells the time, so the same files make the same image.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    command,
    staging::{self, Content, Entry},
    workspace,
};

/// Puts an image for containers together.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    wanted: staging::Wanted,
    /// Name of the image, with its tag.
    #[arg(long, value_name = "NAME:TAG", default_value = concat!("sandwire:", env!("CARGO_PKG_VERSION")))]
    name: String,
}

/// Where the executable is, as it is on hosts: on the PATH that the image sets.
const EXECUTABLE: &str = "usr/bin/sandwire";
const PATH: &str = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";
/// Folders that have to be there to be mounted over.
const FOLDERS: [&str; 6] = ["dev", "etc/sandwire", "proc", "run", "sys", "tmp"];
/// What makes an archive depend on nothing but names and contents.
const TAR: [&str; 6] = [
    "--create",
    "--format=ustar",
    "--sort=name",
    "--mtime=@0",
    "--owner=0:0",
    "--group=0:0",
];

/// Runs `cargo xtask image`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let executable = arguments.wanted.executable()?;
    let output = arguments.wanted.output("image")?;
    println!(
        "{}",
        build(&executable, &arguments.name, &output)?.display()
    );
    Ok(ExitCode::SUCCESS)
}

/// Puts the archive together; where it is.
fn build(executable: &Path, name: &str, output: &Path) -> Result<PathBuf> {
    let (_, tag) = name
        .rsplit_once(':')
        .filter(|(name, tag)| !name.is_empty() && !tag.is_empty() && !tag.contains('/'))
        .with_context(|| format!("the image's name {name:?} isn't NAME:TAG"))?;
    let bytes =
        fs::read(executable).with_context(|| format!("reading {}", executable.display()))?;
    let architecture = staging::architecture(&bytes)
        .with_context(|| format!("{} is no executable of Linux", executable.display()))?;
    fs::create_dir_all(output).with_context(|| format!("creating {}", output.display()))?;
    let (executable, output) = (fs::canonicalize(executable)?, fs::canonicalize(output)?);
    let staging = tempfile::tempdir_in(&output).context("creating a folder for the files")?;
    let (root, layout) = (staging.path().join("root"), staging.path().join("layout"));
    for inside in FOLDERS {
        staging::folder(&root, Path::new(inside))?;
    }
    for entry in entries(&executable)? {
        entry.put(&root)?;
    }
    let layer = staging.path().join("layer.tar");
    archive(&root, &layer)?;
    write_layout(&layout, &layer, name, tag, architecture)?;
    let image = output.join(format!("sandwire_{tag}_{architecture}.oci.tar"));
    archive(&layout, &image)?;
    Ok(image)
}

/// The executable, what it is linked with, and whose that is.
fn entries(executable: &Path) -> Result<Vec<Entry>> {
    let copy = |path: &Path, from: PathBuf, is_executable| Entry {
        path: path.to_owned(),
        content: Content::Copy(from),
        is_executable,
    };
    let mut entries = vec![copy(Path::new(EXECUTABLE), executable.to_owned(), true)];
    let line = executable.to_string_lossy();
    let said = command::program("ldd", [line.as_ref()])
        .output()
        .with_context(|| format!("asking which libraries {line} needs"))?;
    let mut owners = BTreeSet::new();
    for library in libraries(&said)? {
        owners.insert(owner(&library)?);
        let inside = library.strip_prefix("/")?.to_owned();
        entries.push(copy(&inside, library, true));
    }
    for package in owners {
        let copyright = Path::new("usr/share/doc").join(package).join("copyright");
        entries.push(copy(&copyright, Path::new("/").join(&copyright), false));
    }
    for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
        let inside = Path::new("usr/share/doc/sandwire").join(name);
        entries.push(copy(&inside, workspace::root().join(name), false));
    }
    Ok(entries)
}

/// Files that `ldd` names: `NAME => PATH (ADDRESS)`, or `PATH (ADDRESS)` of the one that loads the others. What the kernel brings itself
/// has no path.
fn libraries(said: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in said.lines().map(str::trim) {
        ensure!(!line.contains("not found"), "a library isn't there: {line}");
        let path = line.split_once("=>").map_or(line, |(_, path)| path);
        let path = path.split_whitespace().next().unwrap_or_default();
        if path.starts_with('/') {
            found.push(PathBuf::from(path));
        }
    }
    ensure!(
        !found.is_empty(),
        "ldd names no library of the executable: {said}"
    );
    Ok(found)
}

/// The package that a library is from. dpkg knows it by the path it was installed at, with or without `/usr`.
fn owner(library: &Path) -> Result<String> {
    let path = library.to_string_lossy();
    let other = match path.strip_prefix("/usr") {
        Some(rest) => rest.to_owned(),
        None => format!("/usr{path}"),
    };
    // It fails for the one that it doesn't know, and names the other's all the same.
    let said = Command::new("dpkg-query")
        .args(["--search", path.as_ref(), &other])
        .output()
        .context("starting dpkg-query")?;
    let said = String::from_utf8_lossy(&said.stdout);
    let (package, _) = said.split_once([':', ',']).with_context(|| {
        format!(
            "no Debian package has {path}, so its copyright isn't known: build the image on Debian"
        )
    })?;
    Ok(package.to_owned())
}

fn archive(folder: &Path, file: &Path) -> Result<()> {
    let (folder, file) = (folder.to_string_lossy(), file.to_string_lossy());
    let arguments = TAR
        .into_iter()
        .chain(["--file", &file, "--directory", &folder, "."]);
    command::program("tar", arguments)
        .run()
        .with_context(|| format!("putting {file} together"))
}

/// The files of an image layout: one image, of one layer.
fn write_layout(
    layout: &Path,
    layer: &Path,
    name: &str,
    tag: &str,
    architecture: &str,
) -> Result<()> {
    let blobs = Blobs(layout.join("blobs/sha256"));
    staging::folder(layout, Path::new("blobs/sha256"))?;
    let layer = blobs.put_file(layer)?;
    let labels = json!({
        "org.opencontainers.image.title": "sandwire",
        "org.opencontainers.image.description": "The network for sandboxes on a Linux host",
        "org.opencontainers.image.version": tag,
        "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
    });
    let configuration = blobs.put(&json!({
        "architecture": architecture,
        "os": "linux",
        "config": { "Env": [PATH], "Entrypoint": [format!("/{EXECUTABLE}")], "Labels": labels },
        "rootfs": { "type": "layers", "diff_ids": [layer.digest] },
    }))?;
    let manifest = blobs.put(&json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": configuration.describe("application/vnd.oci.image.config.v1+json"),
        "layers": [layer.describe("application/vnd.oci.image.layer.v1.tar")],
    }))?;
    let mut described = manifest.describe("application/vnd.oci.image.manifest.v1+json");
    described["platform"] = json!({ "architecture": architecture, "os": "linux" });
    described["annotations"] = json!({ "org.opencontainers.image.ref.name": name });
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [described],
    });
    for (file, content) in [
        ("oci-layout", json!({ "imageLayoutVersion": "1.0.0" })),
        ("index.json", index),
    ] {
        let path = layout.join(file);
        fs::write(&path, content.to_string())
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// The folder of contents, each named by its digest.
struct Blobs(PathBuf);

struct Blob {
    digest: String,
    size: u64,
}

impl Blobs {
    fn put(&self, document: &Value) -> Result<Blob> {
        let text = document.to_string();
        let hash = hex(&Sha256::digest(&text));
        let path = self.0.join(&hash);
        fs::write(&path, &text).with_context(|| format!("writing {}", path.display()))?;
        Ok(Blob::new(&hash, text.len() as u64))
    }

    /// Moves a file there.
    fn put_file(&self, file: &Path) -> Result<Blob> {
        let bytes = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
        let hash = hex(&Sha256::digest(&bytes));
        fs::rename(file, self.0.join(&hash))
            .with_context(|| format!("moving {}", file.display()))?;
        Ok(Blob::new(&hash, bytes.len() as u64))
    }
}

impl Blob {
    fn new(hash: &str, size: u64) -> Self {
        Self {
            digest: format!("sha256:{hash}"),
            size,
        }
    }

    fn describe(&self, media_type: &str) -> Value {
        json!({ "mediaType": media_type, "digest": self.digest, "size": self.size })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod container;
#[cfg(test)]
mod tests;
